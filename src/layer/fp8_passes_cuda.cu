// Rows of 16 bits and f32 become fp8 where they lie (round_row.cuh): the pass between two products
// whose rows are rounded beforehand.
//
// Bytes: a row read once, or with one scale a row twice, and written in half as many or fewer.
#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/launch.hpp"
#include "cuda/valid_rows.cuh"
#include "cuda/vectors.cuh"
#include "layer/eights.cuh"
#include "layer/passes.hpp"
#include "layer/plan.hpp"
#include "layer/round_row.cuh"

namespace shunt::cuda_engine {

namespace {

constexpr int threads = 256;

template <int count>
__global__ void __launch_bounds__(count)
    round_rows(char* rows, DType dtype, RowFormat kind, std::int64_t row_bytes,
               std::int64_t columns, std::int64_t scales_at, std::int64_t most,
               const std::int32_t* valid) {
  extern __shared__ float scales[];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t end = valid_rows(valid, most);
  for (std::int64_t row = blockIdx.x; row < end; row += gridDim.x) {
    char* const here = rows + row * row_bytes;
    const auto load = [&](std::int64_t column, float(&x)[8]) {
      load_eight(here, dtype, column, columns, x);
    };
    if (kind == RowFormat::fp8_token) {
      round_whole_row<count>(here, load, columns, scales_at, scales, thread);
    } else {
      round_row<count>(here, load, columns, scales_at, scales, thread);
    }
  }
}

// Rows of 16 bits at multiples of 16 bytes, of up to 1024 columns in eights: a warp has a whole one
// in registers, eight numbers a lane and piece.
constexpr int row_warps = 4, row_pieces = 4;

template <Form form>
__global__ void __launch_bounds__(32 * row_warps)
    round_rows_by_warps(char* rows, RowFormat kind, std::int64_t row_bytes, int columns,
                        std::int64_t scales_at, std::int64_t most, const std::int32_t* valid) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  wait_for_predecessor();
  let_successor_start();
  const std::int64_t end = valid_rows(valid, most);
  const std::int64_t step = std::int64_t{gridDim.x} * row_warps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * row_warps + warp; row < end; row += step) {
    char* const here = rows + row * row_bytes;
    Raw<16> raw[row_pieces];
#pragma unroll
    for (int j = 0; j < row_pieces; ++j) {
      raw[j] = {};
      const int piece = 32 * j + lane;
      if (8 * piece < columns) raw[j] = load_raw<16>(here + 16 * piece);
    }
    const auto largest = [&](const float(&x)[8]) {
      float amax = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = larger_size(amax, x[i]);
      return amax;
    };
    DeviceFp8Scale scale{};
    if (kind == RowFormat::fp8_token) {
      float amax = 0;
#pragma unroll
      for (int j = 0; j < row_pieces; ++j) {
        if (256 * j >= columns) break;
        float x[8];
        widen<8, form>(raw[j], x);
        amax = fmaxf(amax, largest(x));
      }
      // Of magnitudes the bits are in the same order.
      amax = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(amax)));
      scale = device_fp8_scale(amax, 0, false);
    }
    __syncwarp();  // all have been read; now they are written over
    auto* const scales = reinterpret_cast<float*>(here + scales_at);
    if (kind == RowFormat::fp8_token && lane == 0) *scales = scale.scale;
#pragma unroll
    for (int j = 0; j < row_pieces; ++j) {
      if (256 * j >= columns) break;
      const int piece = 32 * j + lane;
      const bool inside = 8 * piece < columns;
      float x[8];
      widen<8, form>(raw[j], x);
      if (kind != RowFormat::fp8_token) {
        float amax = largest(x);
#pragma unroll
        for (int apart = 8; apart > 0; apart /= 2) {
          amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, apart));
        }
        scale = device_fp8_scale(amax, 0, false);
        if (inside && lane % 16 == 0) scales[piece / 16] = scale.scale;
      }
      std::uint32_t two[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        two[i] =
            to_e4m3x2(__fmul_rn(x[2 * i], scale.factor), __fmul_rn(x[2 * i + 1], scale.factor));
      }
      if (inside) {
        *reinterpret_cast<uint2*>(here + 8 * piece) =
            make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
      }
    }
  }
}

}  // namespace

void round_in_place(const Gpu& gpu, RowFormat kind, const Tensor& rows,
                    const Tensor& count_of_rows) {
  if (rows.elements() == 0) return;
  const Fp8Rows to = Fp8Rows::in_place(kind, rows.data, rows.shape[0], rows.shape[1], rows.device);
  const std::int64_t columns = rows.shape[1];
  if (rows.dtype != DType::f32 && columns % 8 == 0 && columns <= 256 * row_pieces &&
      (reinterpret_cast<std::uintptr_t>(rows.data) | to.values.strides[0]) % 16 == 0) {
    const std::int64_t blocks = (rows.shape[0] + row_warps - 1) / row_warps;
    const std::int64_t most = std::int64_t{16} * gpu.multiprocessors;
    launch("round_in_place", gpu,
           {.grid = dim3(static_cast<unsigned>(std::min(blocks, most))),
            .block = dim3(32 * row_warps)},
           rows.dtype == DType::bf16 ? round_rows_by_warps<Form::bf16>
                                     : round_rows_by_warps<Form::f16>,
           static_cast<char*>(rows.data), kind, to.values.strides[0], static_cast<int>(columns),
           Fp8Rows::pitch(columns), rows.shape[0], count_of_rows.as<const std::int32_t>());
    return;
  }
  const auto go = [&](auto* kernel, int count) {
    const std::int64_t most = std::int64_t{2048} / count * gpu.multiprocessors;
    const std::int64_t kept = kind == RowFormat::fp8_token ? count / 32 : to.scales.shape[1];
    launch("round_in_place", gpu,
           {.grid = dim3(static_cast<unsigned>(std::min(rows.shape[0], most))),
            .block = dim3(static_cast<unsigned>(count)),
            .shared = static_cast<std::size_t>(4 * kept)},
           kernel, static_cast<char*>(rows.data), rows.dtype, kind, to.values.strides[0],
           rows.shape[1], Fp8Rows::pitch(rows.shape[1]), rows.shape[0],
           count_of_rows.as<const std::int32_t>());
  };
  // Eight numbers a thread: narrow rows are more at a time.
  constexpr int narrow = 128;
  rows.shape[1] <= 8 * narrow ? go(round_rows<narrow>, narrow) : go(round_rows<threads>, threads);
}

}  // namespace shunt::cuda_engine
