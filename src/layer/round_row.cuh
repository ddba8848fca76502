// A row of 16-bit numbers becomes fp8 where it lies: its values, then its scales.
#pragma once

#include "cuda/fp8.cuh"

namespace shunt::cuda_engine {

// What both forms share. By a block of `threads`; load(column, x): eight numbers of the row from
// `column` on, 0 where it has ended; scale_of(x, column): their scale, by all threads. What is
// written lies before what has not been read.
template <int threads, class Load, class ScaleOf>
__device__ __forceinline__ void round_values(char* row, const Load& load, std::int64_t columns,
                                             const ScaleOf& scale_of, int thread) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 8 == 0;
  for (std::int64_t first = 0; first < columns; first += 8 * threads) {
    const std::int64_t column = first + 8 * thread;
    float x[8];
    load(column, x);
    const DeviceFp8Scale scale = scale_of(x, column);
    __syncthreads();
    std::uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      two[i] = to_e4m3x2(__fmul_rn(x[2 * i], scale.factor), __fmul_rn(x[2 * i + 1], scale.factor));
    }
    if (aligned && column + 8 <= columns) {
      *reinterpret_cast<uint2*>(row + column) =
          make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i < columns) row[column + i] = static_cast<char>(two[i / 2] >> 8 * (i % 2));
      }
    }
  }
  __syncthreads();
}

// The larger of `most` and |x|, where that is finite.
__device__ __forceinline__ float larger_size(float most, float x) {
  const float size = fabsf(x);
  return size < __int_as_float(0x7f800000) ? fmaxf(most, size) : most;
}

// A scale for 128 columns, f32 from row + scales_at on. `scales`: shared, one for each 128 columns.
// Sixteen threads share a scale. The scales, behind the values, come last. Ends with a barrier.
template <int threads, class Load>
__device__ __forceinline__ void round_row(char* row, const Load& load, std::int64_t columns,
                                          std::int64_t scales_at, float* scales, int thread) {
  const auto scale_of = [&](const float(&x)[8], std::int64_t column) {
    float amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger_size(amax, x[i]);
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, apart));
    }
    const DeviceFp8Scale scale = device_fp8_scale(amax, 0, false);
    if (column < columns && thread % 16 == 0) scales[column / 128] = scale.scale;
    return scale;
  };
  round_values<threads>(row, load, columns, scale_of, thread);
  auto* const to = reinterpret_cast<float*>(row + scales_at);
  for (std::int64_t b = thread; b < (columns + 127) / 128; b += threads) to[b] = scales[b];
  __syncthreads();
}

// One scale for the row. `largest`: shared, one for each warp. What is behind the first 8 * threads
// columns is read twice.
template <int threads, class Load>
__device__ __forceinline__ void round_whole_row(char* row, const Load& load, std::int64_t columns,
                                                std::int64_t scale_at, float* largest, int thread) {
  const std::int64_t own = 8 * thread;
  float kept[8], amax = 0;
  load(own, kept);
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = larger_size(amax, kept[i]);
  for (std::int64_t column = own + 8 * threads; column < columns; column += 8 * threads) {
    float x[8];
    load(column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger_size(amax, x[i]);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, apart));
  }
  if (thread % 32 == 0) largest[thread / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < threads / 32; ++w) amax = fmaxf(amax, largest[w]);
  const DeviceFp8Scale scale = device_fp8_scale(amax, 0, false);
  const auto load_again = [&](std::int64_t column, float(&x)[8]) {
    if (column != own) return load(column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = kept[i];
  };
  round_values<threads>(
      row, load_again, columns, [&](const float(&)[8], std::int64_t) { return scale; }, thread);
  if (thread == 0) *reinterpret_cast<float*>(row + scale_at) = scale.scale;
  __syncthreads();
}

}  // namespace shunt::cuda_engine
