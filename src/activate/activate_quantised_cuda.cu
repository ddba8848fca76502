// activate to fp8 on a GPU.
//
// A block takes one row after another; its warps, one for 512 columns and eight at most, take every
// warps-th chunk of 128 columns, four numbers a lane. Four chunks of gate and of up are loaded
// before anything is computed. amax is a maximum over the lanes of a chunk (block_128), or over the
// block (row: one barrier, two buffers in turns); rows of more than 4096 columns are then read and
// computed again. Rows of 16 bits at multiples of 16 bytes have kernels of their own, 16 neighbours
// a lane.
//
// Bytes: gate and up once, a byte an element, the scales. About 55 operations a number (SwiGLU),
// which take some 2.3 times as long as the bytes (docs/notes/cuda-move.md, "Activate").
#include <algorithm>

#include "activate/cuda_engine.hpp"
#include "activate/quick.cuh"
#include "cuda/element.cuh"
#include "cuda/fp8_quads.cuh"
#include "cuda/launch.hpp"
#include "cuda/valid_rows.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int kept = 4;  // chunks a warp
constexpr int most_warps = 8;

struct QuantisedArgs {
  cpu_engine::ActivationRule rule;
  RowsView gate, up;
  char* out;
  std::int64_t out_row_bytes;
  float* scales;
  std::int64_t scale_row, scale_column;  // strides in elements
  std::int64_t rows, width;
  const std::int32_t* count;  // rows at or past it are left alone; may be null
  float upper_bound;
  bool power_of_two, per_row;
};

// Four numbers a lane where gate and up are of one type, and aligned.
template <Form of>
struct Aligned {
  static constexpr bool aligned = true;
  Quad<of, true> quad;
  __device__ void load(const RowsView& from, std::int64_t row, std::int64_t h, std::int64_t width,
                       int lane) {
    quad.load(from.data + row * from.row_bytes, h, width, lane);
  }
  __device__ void values(float (&x)[4]) const { quad.values(1.0f, x); }
};
// Where not.
struct Any {
  static constexpr bool aligned = false;
  float x[4];
  __device__ void load(const RowsView& from, std::int64_t row, std::int64_t h, std::int64_t width,
                       int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = h + 32 * i + lane;
      x[i] = at < width
                 ? load_element(from.data + row * from.row_bytes, static_cast<DType>(from.form), at)
                 : 0.0f;
    }
  }
  __device__ void values(float (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = x[i];
  }
};

template <class Numbers, Quick quick>
__global__ void __launch_bounds__(32 * most_warps)
    activate_quantised_rows(const __grid_constant__ QuantisedArgs args) {
  __shared__ std::uint32_t most_of_warp[2][most_warps];  // in turns
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::int64_t step = std::int64_t{warps} * chunk;
  const std::int64_t rows = valid_rows(args.count, args.rows);
  const auto scale_of = [&](std::uint32_t most) {
    return device_fp8_scale(__uint_as_float(most), args.upper_bound, args.power_of_two);
  };
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float* const scales = args.scales + row * args.scale_row;
    char* const out = args.out + row * args.out_row_bytes;
    float x[kept][4];
    // Past the row's end both are 0, and so is what every rule makes of that.
    const auto compute = [&](std::int64_t begin) {
      Numbers gates[kept], ups[kept];
#pragma unroll
      for (int j = 0; j < kept; ++j) {
        const std::int64_t h = begin + j * step;
        if (h >= args.width) continue;
        if (quick != Quick::no || args.rule.gated)
          gates[j].load(args.gate, row, h, args.width, lane);
        ups[j].load(args.up, row, h, args.width, lane);
      }
#pragma unroll
      for (int j = 0; j < kept; ++j) {
        float gate[4] = {};
        if (begin + j * step >= args.width) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[j][i] = 0;
          continue;
        }
        if (quick != Quick::no || args.rule.gated) gates[j].values(gate);
        ups[j].values(x[j]);
        Activate<quick, 4, Division::compilers>{args.rule, gate, x[j]}();
      }
    };
    const std::int64_t first = std::int64_t{warp} * chunk;
    const bool at_once = args.width <= kept * step;
    DeviceFp8Scale scale{};
    std::uint32_t most = 0;
#pragma unroll 1
    for (int pass = args.per_row ? 0 : 1; pass < 2; ++pass) {
      if (args.per_row && pass == 1) {
        most = __reduce_max_sync(0xffffffffu, most);
        if (lane == 0) most_of_warp[turn][warp] = most;
        __syncthreads();
        for (int w = 0; w < warps; ++w) most = max(most, most_of_warp[turn][w]);
        turn ^= 1;
        scale = scale_of(most);
        if (threadIdx.x == 0) *scales = scale.scale;
      }
#pragma unroll 1
      for (std::int64_t begin = first; begin - first < args.width; begin += kept * step) {
        if (!(args.per_row && pass == 1 && at_once)) compute(begin);
#pragma unroll
        for (int j = 0; j < kept; ++j) {
          const std::int64_t h = begin + j * step;
          if (pass == 0) {
            most = max(most, amax_bits(x[j]));
          } else if (h < args.width) {
            if (!args.per_row) {
              scale = scale_of(__reduce_max_sync(0xffffffffu, amax_bits(x[j])));
              if (lane == 0) scales[h / chunk * args.scale_column] = scale.scale;
            }
            store_quad<Numbers::aligned>(out, quad_to_e4m3(x[j], scale.factor), h, args.width,
                                         lane);
          }
        }
      }
    }
  }
}

// ---- rows of 16 bits at multiples of 16 bytes --------------------------------------------------

constexpr int each = 16, span = 32 * each;  // columns of a lane, of a warp
constexpr int most_of_a_row = 16 * span;    // columns that a block has in registers

// A lane has 16 neighbours. block_128: warps are apart, a span of a row each; row: a block has the
// whole row, and one barrier.
template <Form form, Quick quick, bool per_row>
__global__ void __launch_bounds__(per_row ? most_of_a_row / each : 128)
    activate_spans(const __grid_constant__ QuantisedArgs args, int spans) {
  __shared__ std::uint32_t most_of_warp[2][most_of_a_row / span];  // in turns
  wait_for_predecessor();
  let_successor_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::int64_t rows = valid_rows(args.count, args.rows);
  const int column = (per_row ? warp : static_cast<int>(blockIdx.x)) * span + lane * each;
  const bool inside = column < args.width;
  const std::int64_t first = per_row ? blockIdx.x : std::int64_t{blockIdx.y} * warps + warp;
  const std::int64_t step = per_row ? gridDim.x : std::int64_t{gridDim.y} * warps;
  int turn = 0;
  for (std::int64_t row = first; row < rows; row += step) {
    Raw<2 * each> raw_gate{}, raw_up{};
    if (inside) {
      if (quick != Quick::no || args.rule.gated) {
        raw_gate = load_raw<2 * each>(args.gate.data + row * args.gate.row_bytes + 2 * column);
      }
      raw_up = load_raw<2 * each>(args.up.data + row * args.up.row_bytes + 2 * column);
    }
    float gate[each], x[each];
    widen<each, form>(raw_gate, gate);
    widen<each, form>(raw_up, x);
    // A lane past the row's end would hold up the others: 0 is divided by the long way.
    if (inside) Activate<quick, each, Division::own>{args.rule, gate, x}();
    std::uint32_t most = amax_bits(x);
    if constexpr (per_row) {
      most = __reduce_max_sync(0xffffffffu, most);
      if (lane == 0) most_of_warp[turn][warp] = most;
      __syncthreads();
      for (int w = 0; w < spans; ++w) most = max(most, most_of_warp[turn][w]);
      turn ^= 1;
    } else {
#pragma unroll
      for (int apart = chunk / each / 2; apart > 0; apart /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
      }
    }
    const DeviceFp8Scale scale =
        device_fp8_scale(__uint_as_float(most), args.upper_bound, args.power_of_two);
    Raw<each> out;
#pragma unroll
    for (int i = 0; i < each / 4; ++i) {
      const float four[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      out.word[i] = quad_to_e4m3(four, scale.factor);
    }
    if (inside) store_raw(args.out + row * args.out_row_bytes + column, out);
    const bool writes = per_row ? threadIdx.x == 0 : inside && lane % (chunk / each) == 0;
    if (writes) {
      args.scales[row * args.scale_row + (per_row ? 0 : column / chunk * args.scale_column)] =
          scale.scale;
    }
  }
}

template <Form form, Quick quick>
void start_spans(const Gpu& gpu, const QuantisedArgs& args) {
  const auto spans = static_cast<int>((args.width + span - 1) / span);
  if (args.per_row) {
    const std::int64_t most = std::int64_t{2} * gpu.multiprocessors * (2048 / (32 * spans));
    launch("activate", gpu,
           {.grid = dim3(static_cast<unsigned>(std::min(args.rows, most))),
            .block = dim3(static_cast<unsigned>(32 * spans))},
           activate_spans<form, quick, true>, args, spans);
    return;
  }
  constexpr int warps = 4;
  const std::int64_t blocks = (args.rows + warps - 1) / warps;
  launch("activate", gpu,
         {.grid = dim3(static_cast<unsigned>(spans),
                       static_cast<unsigned>(std::min<std::int64_t>(blocks, 65535))),
          .block = dim3(32 * warps)},
         activate_spans<form, quick, false>, args, spans);
}

template <Form form>
bool launch_spans(const Gpu& gpu, const QuantisedArgs& args) {
  const bool fits = args.width > 0 && args.width % each == 0 &&
                    args.width < std::int64_t{1} << 30 &&
                    (!args.per_row || args.width <= most_of_a_row) && args.up.aligned(16) &&
                    (!args.rule.gated || args.gate.aligned(16)) &&
                    (reinterpret_cast<std::uintptr_t>(args.out) |
                     static_cast<std::uint64_t>(args.out_row_bytes)) %
                            16 ==
                        0;
  if (!fits) return false;
  with_quick(args.rule, [&]<Quick quick>() { start_spans<form, quick>(gpu, args); });
  return true;
}

template <class Numbers, Quick quick>
void start_as(const Gpu& gpu, const QuantisedArgs& args) {
  const std::int64_t chunks = (args.width + chunk - 1) / chunk;
  const auto warps = std::clamp<std::int64_t>((chunks + kept - 1) / kept, 1, most_warps);
  // Blocks of few warps: 32 fit a multiprocessor. Twice as many, for the last ones to be even.
  const std::int64_t most =
      std::int64_t{2} * gpu.multiprocessors * std::min<std::int64_t>(32, 64 / warps);
  launch("activate", gpu,
         {.grid = dim3(static_cast<unsigned>(std::min(args.rows, most))),
          .block = dim3(static_cast<unsigned>(32 * warps))},
         activate_quantised_rows<Numbers, quick>, args);
}

template <class Numbers>
void start(const Gpu& gpu, const QuantisedArgs& args) {
  with_quick(args.rule, [&]<Quick quick>() { start_as<Numbers, quick>(gpu, args); });
}

}  // namespace

void activate_quantised(const Gpu& gpu, const cpu_engine::ActivationRule& rule,
                        const QuantiseSpec& quantise, const Tensor& gate, const Tensor& up,
                        const Tensor& out, const Tensor& scales, const Tensor& rows) {
  const bool per_row = quantise.quantise == Quantise::row;
  const QuantisedArgs args{.rule = rule,
                           .gate = RowsView(gate),
                           .up = RowsView(up),
                           .out = out.as<char>(),
                           .out_row_bytes = out.strides[0],
                           .scales = scales.as<float>(),
                           .scale_row = scales.strides[0],
                           .scale_column = per_row ? 0 : scales.strides[1],
                           .rows = up.shape[0],
                           .width = up.shape[1],
                           .count = rows.as<const std::int32_t>(),
                           .upper_bound = quantise.scale_upper_bound,
                           .power_of_two = quantise.power_of_two_scales,
                           .per_row = per_row};
  if (args.rows == 0) return;
  const auto fits = [](const RowsView& view) { return view.aligned(4 * form_bytes(view.form)); };
  const bool aligned = args.width % 4 == 0 && RowsView(out).aligned(4) && fits(args.up) &&
                       (!rule.gated || (gate.dtype == up.dtype && fits(args.gate)));
  if (!aligned) return start<Any>(gpu, args);
  switch (args.up.form) {
    case Form::f32:
      return start<Aligned<Form::f32>>(gpu, args);
    case Form::f16:
      return launch_spans<Form::f16>(gpu, args) ? void() : start<Aligned<Form::f16>>(gpu, args);
    default:
      return launch_spans<Form::bf16>(gpu, args) ? void() : start<Aligned<Form::bf16>>(gpu, args);
  }
}

}  // namespace shunt::cuda_engine
