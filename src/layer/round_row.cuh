// A row of 16-bit numbers becomes fp8 where it lies: its values, then a scale for 128 of them.
#pragma once

#include "cuda/fp8.cuh"

namespace shunt::cuda_engine {

// By a block of `threads`; load(i): number i of the row; `scales`: shared, one for each 128
// columns. Threads have eight columns each, 16 of them those that share a scale. What is written
// lies before what has not been read; the scales, behind the values, come last. Ends with a
// barrier.
template <int threads, class Load>
__device__ __forceinline__ void round_row(char* row, const Load& load, std::int64_t columns,
                                          std::int64_t scales_at, float* scales, int thread) {
  for (std::int64_t first = 0; first < columns; first += 8 * threads) {
    const std::int64_t column = first + 8 * thread;
    float x[8], amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = column + i < columns ? load(column + i) : 0.0f;
      const float size = fabsf(x[i]);
      if (size < __int_as_float(0x7f800000)) amax = fmaxf(amax, size);
    }
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, apart));
    }
    const DeviceFp8Scale scale = device_fp8_scale(amax, 0, false);
    __syncthreads();
    if (column < columns && thread % 16 == 0) scales[column / 128] = scale.scale;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const std::uint32_t two =
          to_e4m3x2(__fmul_rn(x[i], scale.factor), __fmul_rn(x[i + 1], scale.factor));
      if (column + i < columns) row[column + i] = static_cast<char>(two & 0xff);
      if (column + i + 1 < columns) row[column + i + 1] = static_cast<char>(two >> 8 & 0xff);
    }
  }
  __syncthreads();
  auto* const to = reinterpret_cast<float*>(row + scales_at);
  for (std::int64_t b = thread; b < (columns + 127) / 128; b += threads) to[b] = scales[b];
  __syncthreads();
}

}  // namespace shunt::cuda_engine
