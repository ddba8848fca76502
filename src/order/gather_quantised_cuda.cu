// gather to fp8 on a GPU.
//
// A block takes one item after another: a row to write, or with the order's inverse a token, whose
// quantised row is then written to all of its rows (without weights, which differ from row to row).
// Its warps take every warps-th chunk of 128 columns, four elements a lane: lane i's are 4 i .. 4 i
// + 3 where rows are aligned, else i, i + 32, i + 64 and i + 96. Up to eight chunks a warp stay in
// registers, loaded before anything is computed; rows of more than 8192 columns are read again,
// from the L2, for what comes after. amax is a maximum of the bits of magnitudes, in which
// infinities and NaN count as 0: over the lanes of a chunk (block_128), or over the block as well
// (row; barrier: every warp's maximum is there; at the loop's end: all have read them).
//
// Rows of 16 bits at multiples of 16 bytes have kernels of their own: a warp takes 512 columns of
// an item, 16 a lane, and knows all rows that they go to before it computes. It stores 16 bytes a
// lane, and executes 10 instructions a row and 512 columns. With a scale a row (of 8192 columns at
// most) a block has the whole item, and one barrier.
//
// Bytes: as gather, with rows of one byte an element and the scales. Predicted: 80 % of a copy.
#include "cuda/fp8_quads.cuh"
#include "order/gather_cuda.hpp"

namespace shunt {

namespace {

using namespace cuda_engine;

constexpr int kept = 8;  // chunks a warp
constexpr int warps_of_block = 8;

struct QuantiseCall {
  PermutationMap by_row;
  InverseMap by_token;
  RowsView from;
  char* to;
  std::int64_t to_row_bytes;
  float* scales;
  std::int64_t scale_row, scale_column;  // strides in elements
  std::int64_t items, width;
  float upper_bound;
  bool power_of_two, per_row;
};

// The same chunk of every row that the item is written to.
template <bool aligned, class Rows>
__device__ void write(const QuantiseCall& call, const float (&x)[4], float factor, std::int64_t h,
                      int lane, const Rows& for_each_row) {
  const std::uint32_t word = quad_to_e4m3(x, factor);
  for_each_row([&](std::int64_t row) {
    store_quad<aligned>(call.to + row * call.to_row_bytes, word, h, call.width, lane);
  });
}

template <Form form, bool aligned, bool spread>
__global__ void __launch_bounds__(32 * warps_of_block) quantise_kernel(QuantiseCall call) {
  __shared__ std::uint32_t most_of_warp[warps_of_block];
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::int64_t items = spread ? call.items : call.by_row.items();
  const std::int32_t row_count = spread ? call.by_token.row_count() : 0;
  const std::int64_t step = std::int64_t{warps} * chunk;

  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    MoveItem move{.from = item, .to = item};
    if constexpr (!spread) move = call.by_row.item(item);
    if (move.from < 0) continue;  // so for the whole block
    const auto for_each_row = [&](const auto& body) {
      if constexpr (spread) {
        for (int s = 0; s < call.by_token.targets; ++s) {
          const std::int32_t row = call.by_token.target(item * call.by_token.targets + s);
          if (row >= 0 && row < row_count) body(std::int64_t{row});
        }
      } else {
        body(move.to);
      }
    };
    const auto write_scale = [&](float scale, std::int64_t column) {
      for_each_row([&](std::int64_t row) {
        call.scales[row * call.scale_row + column * call.scale_column] = scale;
      });
    };
    const auto scale_of = [&](std::uint32_t most) {
      return device_fp8_scale(__uint_as_float(most), call.upper_bound, call.power_of_two);
    };
    const char* const row = call.from.data + move.from * call.from.row_bytes;
    const std::int64_t begin = std::int64_t{warp} * chunk;

    Quad<form, aligned> quads[kept];
#pragma unroll
    for (int j = 0; j < kept; ++j) {
      if (begin + j * step < call.width) quads[j].load(row, begin + j * step, call.width, lane);
    }
    DeviceFp8Scale scale{};
    if (call.per_row) {
      std::uint32_t most = 0;
      const auto count = [&](const Quad<form, aligned>& quad) {
        float x[4];
        quad.values(move.weight, x);
        most = max(most, amax_bits(x));
      };
#pragma unroll
      for (int j = 0; j < kept; ++j) {
        if (begin + j * step < call.width) count(quads[j]);
      }
      for (std::int64_t h = begin + kept * step; h < call.width; h += step) {
        Quad<form, aligned> quad;
        quad.load(row, h, call.width, lane);
        count(quad);
      }
      for (int apart = 16; apart > 0; apart /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
      }
      if (lane == 0) most_of_warp[warp] = most;
      __syncthreads();
      for (int w = 0; w < warps; ++w) most = max(most, most_of_warp[w]);
      scale = scale_of(most);
      if (threadIdx.x == 0) write_scale(scale.scale, 0);
    }
    const auto finish = [&](const Quad<form, aligned>& quad, std::int64_t h) {
      float x[4];
      quad.values(move.weight, x);
      if (!call.per_row) {
        std::uint32_t most = amax_bits(x);
        for (int apart = 16; apart > 0; apart /= 2) {
          most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
        }
        scale = scale_of(most);
        if (lane == 0) write_scale(scale.scale, h / chunk);
      }
      write<aligned>(call, x, scale.factor, h, lane, for_each_row);
    };
#pragma unroll
    for (int j = 0; j < kept; ++j) {
      if (begin + j * step < call.width) finish(quads[j], begin + j * step);
    }
    for (std::int64_t h = begin + kept * step; h < call.width; h += step) {
      Quad<form, aligned> quad;
      quad.load(row, h, call.width, lane);
      finish(quad, h);
    }
    if (call.per_row) __syncthreads();
  }
}

constexpr int each = 16, span = 32 * each;  // columns of a lane, of a warp
constexpr int warps_together = 4;
constexpr int most_of_a_row = 8192;  // columns that a block has in registers

// Lane i: row i of those that an item goes to, or -1. None, where the item is no row.
template <bool spread>
__device__ __forceinline__ int find_targets(const QuantiseCall& call, std::int64_t item, int lane,
                                            MoveItem& move, std::int32_t& target) {
  move = {.from = item, .to = item};
  target = -1;
  if constexpr (spread) {
    const int targets = call.by_token.targets;
    if (lane < targets) target = call.by_token.target(item * targets + lane);
    if (target >= call.by_token.row_count()) target = -1;
    return targets;
  } else {
    move = call.by_row.item(item);
    target = static_cast<std::int32_t>(move.to);
    return move.from < 0 ? 0 : 1;
  }
}

// 16 numbers of a row, weighed, and the bits of the largest magnitude among them.
template <Form form>
__device__ __forceinline__ std::uint32_t load_sixteen(const QuantiseCall& call,
                                                      const MoveItem& move, std::int64_t column,
                                                      bool inside, float (&x)[each]) {
  Raw<2 * each> raw{};
  if (inside) {
    raw = load_raw<2 * each>(call.from.data + move.from * call.from.row_bytes + 2 * column);
  }
  widen<each, form>(raw, x);
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    x[i] = __fmul_rn(move.weight, x[i]);
    const std::uint32_t size = __float_as_uint(x[i]) & 0x7fffffffu;
    most = max(most, size < 0x7f800000u ? size : 0);
  }
  return most;
}

// To column `column` of all targets; `first`: of the lanes that share a scale.
__device__ __forceinline__ void write_sixteen(const QuantiseCall& call, const float (&x)[each],
                                              const DeviceFp8Scale& scale, std::int64_t column,
                                              std::int64_t scale_column, bool inside, bool first,
                                              int targets, std::int32_t target) {
  std::uint32_t words[each / 4];
#pragma unroll
  for (int i = 0; i < each / 4; ++i) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(x[4 * i + j], scale.factor);
    words[i] = to_e4m3x2(y[0], y[1]) | to_e4m3x2(y[2], y[3]) << 16;
  }
  const uint4 out = make_uint4(words[0], words[1], words[2], words[3]);
  char* const to = call.to + column;
  float* const to_scale = call.scales + scale_column * call.scale_column;
#pragma unroll 4
  for (int i = 0; i < targets; ++i) {
    const std::int64_t row = __shfl_sync(0xffffffffu, target, i);
    if (row < 0) continue;
    // The experts' product reads them next: as they come, nothing is marked to leave the L2.
    if (inside) *reinterpret_cast<uint4*>(to + row * call.to_row_bytes) = out;
    if (first) to_scale[row * call.scale_row] = scale.scale;
  }
}

// blockIdx.x: spans of columns, so that a row's are written at about the same time; blockIdx.y:
// items.
template <Form form, bool spread>
__global__ void __launch_bounds__(32 * warps_together)
    quantise_blocks_kernel(const __grid_constant__ QuantiseCall call) {
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t items = spread ? call.items : call.by_row.items();
  const std::int64_t step = std::int64_t{gridDim.y} * warps_together;
  const std::int64_t column = std::int64_t{blockIdx.x} * span + lane * each;
  const bool inside = column < call.width;
  for (std::int64_t item = std::int64_t{blockIdx.y} * warps_together + warp; item < items;
       item += step) {
    MoveItem move;
    std::int32_t target;
    const int targets = find_targets<spread>(call, item, lane, move, target);
    if (targets == 0) continue;  // so for the whole warp
    float x[each];
    std::uint32_t most = load_sixteen<form>(call, move, column, inside, x);
#pragma unroll
    for (int apart = chunk / each / 2; apart > 0; apart /= 2) {
      most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
    }
    const DeviceFp8Scale scale =
        device_fp8_scale(__uint_as_float(most), call.upper_bound, call.power_of_two);
    const bool first = inside && lane % (chunk / each) == 0;
    write_sixteen(call, x, scale, column, column / chunk, inside, first, targets, target);
  }
}

// A block an item, all of its columns.
template <Form form, bool spread>
__global__ void __launch_bounds__(most_of_a_row / each)
    quantise_rows_kernel(const __grid_constant__ QuantiseCall call) {
  __shared__ std::uint32_t most_of_warp[2][most_of_a_row / span];  // in turns
  wait_for_predecessor();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::int64_t items = spread ? call.items : call.by_row.items();
  const std::int64_t column = std::int64_t{thread} * each;
  const bool inside = column < call.width;
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    MoveItem move;
    std::int32_t target;
    const int targets = find_targets<spread>(call, item, lane, move, target);
    if (targets == 0) continue;  // so for the whole block
    float x[each];
    std::uint32_t most = load_sixteen<form>(call, move, column, inside, x);
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) most_of_warp[turn][thread / 32] = most;
    __syncthreads();
    for (int w = 0; w < warps; ++w) most = max(most, most_of_warp[turn][w]);
    const DeviceFp8Scale scale =
        device_fp8_scale(__uint_as_float(most), call.upper_bound, call.power_of_two);
    write_sixteen(call, x, scale, column, 0, inside, thread == 0, targets, target);
    turn ^= 1;  // not where an item was passed over: then there was no barrier
  }
}

template <Form form, bool spread>
bool launch_quantise_blocks(const Gpu& gpu, const QuantiseCall& call) {
  const bool fits = call.width > 0 && (!call.per_row || call.width <= most_of_a_row) &&
                    call.width % each == 0 && call.from.aligned(16) &&
                    (reinterpret_cast<std::uintptr_t>(call.to) | call.to_row_bytes) % 16 == 0 &&
                    (!spread || call.by_token.targets <= 32);
  const std::int64_t spans = (call.width + span - 1) / span;
  if (!fits) return false;
  if (call.per_row) {
    const std::int64_t most = 2 * gpu.multiprocessors * (2048 / (32 * spans));
    launch("gather", gpu,
           {.grid = {static_cast<unsigned>(std::min(call.items, most))},
            .block = {static_cast<unsigned>(32 * spans)}},
           quantise_rows_kernel<form, spread>, call);
    return true;
  }
  const std::int64_t blocks = (call.items + warps_together - 1) / warps_together;
  launch("gather", gpu,
         {.grid = {static_cast<unsigned>(spans),
                   static_cast<unsigned>(std::min<std::int64_t>(blocks, 65535))},
          .block = {32 * warps_together}},
         quantise_blocks_kernel<form, spread>, call);
  return true;
}

template <Form form, bool aligned, bool spread>
void launch_quantise(const Gpu& gpu, const QuantiseCall& call) {
  const std::int64_t chunks = (call.width + chunk - 1) / chunk;
  const auto warps = static_cast<unsigned>(std::clamp<std::int64_t>(chunks, 1, warps_of_block));
  launch("gather", gpu,
         {.grid = {static_cast<unsigned>(
              std::min<std::int64_t>(call.items, 16 * gpu.multiprocessors * 8 / warps))},
          .block = {32 * warps}},
         quantise_kernel<form, aligned, spread>, call);
}

template <Form form>
void quantise(const Gpu& gpu, const QuantiseCall& call, bool aligned, bool spread) {
  if constexpr (form != Form::f32) {
    if (spread ? launch_quantise_blocks<form, true>(gpu, call)
               : launch_quantise_blocks<form, false>(gpu, call)) {
      return;
    }
  }
  if (spread) {
    aligned ? launch_quantise<form, true, true>(gpu, call)
            : launch_quantise<form, false, true>(gpu, call);
  } else {
    aligned ? launch_quantise<form, true, false>(gpu, call)
            : launch_quantise<form, false, false>(gpu, call);
  }
}

}  // namespace

void gather_quantised_cuda(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                           const Tensor& rows, const Tensor& scales, const PermutationMap& by_row,
                           const InverseMap& by_token) {
  const bool spread = by_token.inverse != nullptr && by_row.weights == nullptr;
  const QuantiseCall call{.by_row = by_row,
                          .by_token = by_token,
                          .from = RowsView(in.hidden),
                          .to = rows.as<char>(),
                          .to_row_bytes = rows.strides[0],
                          .scales = scales.as<float>(),
                          .scale_row = scales.strides[0],
                          .scale_column = scales.rank > 1 ? scales.strides[1] : 0,
                          .items = spread ? by_token.tokens : by_row.pairs,
                          .width = in.hidden.shape[1],
                          .upper_bound = spec.scale_upper_bound,
                          .power_of_two = spec.power_of_two_scales,
                          .per_row = spec.quantise == Quantise::row};
  if (call.items == 0) return;
  const RowsView to(rows);
  const bool aligned =
      call.width % 4 == 0 && call.from.aligned(4 * form_bytes(call.from.form)) && to.aligned(4);
  switch (call.from.form) {
    case Form::f32:
      return quantise<Form::f32>(gpu(context), call, aligned, spread);
    case Form::f16:
      return quantise<Form::f16>(gpu(context), call, aligned, spread);
    default:
      return quantise<Form::bf16>(gpu(context), call, aligned, spread);
  }
}

void quantise_rows_cuda(const Context& context, Quantise quantise, const Tensor& hidden,
                        const Tensor& valid, const Tensor& rows, const Tensor& scales) {
  const PermutationMap in_place{.permutation = nullptr,
                                .count = valid.as<const std::int32_t>(),
                                .weights = nullptr,
                                .pairs = static_cast<std::int32_t>(hidden.shape[0]),
                                .slots = Divisor(1)};
  gather_quantised_cuda(context, {.slots = 1, .quantise = quantise}, {.hidden = hidden}, rows,
                        scales, in_place, {});
}

}  // namespace shunt
