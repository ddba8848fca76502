// How lanes of a warp round rows to fp8 on their way to a product: 16 lanes have 128 numbers, eight
// each, and find their scale together.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/hopper.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// device_fp8_scale() of 1e-12 to 1e30 without a branch, so that several are under way at once: by
// reciprocals and remainders, which give the very quotients.
__device__ __forceinline__ DeviceFp8Scale quick_fp8_scale(float amax) {
  constexpr float of_448 = 1.0f / 448.0f;
  const float near = __fmul_rn(amax, of_448);
  const float scale = __fmaf_rn(__fmaf_rn(-448.0f, near, amax), of_448, near);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(amax));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    inverse = __fmaf_rn(inverse, __fmaf_rn(-amax, inverse, 1.0f), inverse);
  }
  const float about = __fmul_rn(448.0f, inverse);
  return {scale, __fmaf_rn(__fmaf_rn(-amax, about, 448.0f), inverse, about)};
}

// Of n times 128 numbers, of each of which 16 neighbouring lanes hold eight: the scale, and the
// numbers as e4m3.
template <int n>
__device__ __forceinline__ void quantise(const float (&x)[n][8], std::uint32_t (&q)[n][2],
                                         float (&scales)[n]) {
  std::uint32_t most[n];
#pragma unroll
  for (int c = 0; c < n; ++c) {
    most[c] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t size = __float_as_uint(x[c][i]) & 0x7fffffffu;
      most[c] = max(most[c], size < 0x7f800000u ? size : 0);
    }
  }
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) {
#pragma unroll
    for (int c = 0; c < n; ++c) {
      most[c] = max(most[c], __shfl_xor_sync(0xffffffffu, most[c], apart));
    }
  }
  DeviceFp8Scale scale[n];
  bool large = false;
#pragma unroll
  for (int c = 0; c < n; ++c) {
    const float amax = fmaxf(__uint_as_float(most[c]), 1e-12f);
    large = large || amax > 1e30f;
    scale[c] = quick_fp8_scale(amax);
  }
  if (large) {
#pragma unroll
    for (int c = 0; c < n; ++c) scale[c] = device_fp8_scale(__uint_as_float(most[c]), 0, false);
  }
#pragma unroll
  for (int c = 0; c < n; ++c) {
    const float factor = scale[c].factor;
    scales[c] = scale[c].scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const four = x[c] + 4 * i;
      q[c][i] = to_e4m3x2(__fmul_rn(four[0], factor), __fmul_rn(four[1], factor)) |
                to_e4m3x2(__fmul_rn(four[2], factor), __fmul_rn(four[3], factor)) << 16;
    }
  }
}

}  // namespace shunt::cuda_engine

#endif
