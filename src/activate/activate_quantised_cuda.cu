// activate to fp8 on a GPU.
//
// A block takes one row after another; its warps, one for 512 columns and eight at most, take every
// warps-th chunk of 128 columns, four numbers a lane. Four chunks of gate and of up are loaded
// before anything is computed. amax is a maximum over the lanes of a chunk (block_128), or over the
// block (row: one barrier, two buffers in turns); rows of more than 4096 columns are then read and
// computed again.
//
// Bytes: gate and up once, a byte an element, the scales. About 55 operations a number (SwiGLU),
// which take twice as long as the bytes.
#include <algorithm>

#include "activate/cuda_engine.hpp"
#include "activate/quick.cuh"
#include "cuda/element.cuh"
#include "cuda/fp8_quads.cuh"
#include "cuda/launch.hpp"

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
  std::int64_t rows = args.rows;
  if (args.count != nullptr) {
    const std::int64_t count = *args.count;
    rows = count < 0 ? 0 : count < rows ? count : rows;
  }
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
        Activate<quick, 4>{args.rule, gate, x[j]}();
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
  switch (quick_form(args.rule)) {
    case Quick::swiglu:
      return start_as<Numbers, Quick::swiglu>(gpu, args);
    case Quick::limited_swiglu:
      return start_as<Numbers, Quick::limited_swiglu>(gpu, args);
    case Quick::no:
      return start_as<Numbers, Quick::no>(gpu, args);
  }
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
      return start<Aligned<Form::f16>>(gpu, args);
    default:
      return start<Aligned<Form::bf16>>(gpu, args);
  }
}

}  // namespace shunt::cuda_engine
