// How lanes of a warp round rows to fp8 on their way to a product: 16 lanes have 128 numbers, eight
// each, and find their scale together.
#pragma once

#include "cuda/element.cuh"
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

// From the bits of the largest magnitudes.
template <int n>
__device__ __forceinline__ void find_scales(const std::uint32_t (&most)[n],
                                            DeviceFp8Scale (&scale)[n]) {
  bool large = false;
#pragma unroll
  for (int c = 0; c < n; ++c) {
    const float amax = fmaxf(__uint_as_float(most[c]), 1e-12f);
    large = large || amax > 1e30f;
    scale[c] = quick_fp8_scale(amax);
  }
  if (large) {  // 2^-64 of the number has the same digits
#pragma unroll
    for (int c = 0; c < n; ++c) {
      const float amax = fmaxf(__uint_as_float(most[c]), 1e-12f);
      if (amax <= 1e30f) continue;
      const DeviceFp8Scale part = quick_fp8_scale(amax * 0x1p-64f);
      scale[c] = {part.scale * 0x1p64f, part.factor * 0x1p-64f};
    }
  }
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
  find_scales<n>(most, scale);
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

__device__ __forceinline__ std::uint32_t larger_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Likewise of numbers of 16 bits, two a word: the largest are looked for among halves, two rows of
// them by one shuffle, and a number becomes f32 only when it is rounded.
template <bool bf16, int n>
__device__ __forceinline__ void quantise(const std::uint32_t (&x)[n][4], std::uint32_t (&q)[n][2],
                                         float (&scales)[n]) {
  static_assert(n == 1 || n % 2 == 0);
  constexpr std::uint32_t infinite = bf16 ? 0x00800080u : 0x04000400u;  // reaches the sign with it
  constexpr int both = (n + 1) / 2;
  std::uint32_t halves[2 * both] = {};
#pragma unroll
  for (int c = 0; c < n; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t size = x[c][i] & 0x7fff7fffu;
      const std::uint32_t no_number = ((size + infinite) >> 15 & 0x00010001u) * 0xffffu;
      halves[c] = larger_halves(halves[c], size & ~no_number);
    }
  }
  std::uint32_t most[n];
#pragma unroll
  for (int p = 0; p < both; ++p) {
    const std::uint32_t a = halves[2 * p], b = halves[2 * p + 1];
    std::uint32_t two = larger_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      two = larger_halves(two, __shfl_xor_sync(0xffffffffu, two, apart));
    }
#pragma unroll
    for (int h = 0; h < 2 && 2 * p + h < n; ++h) {
      const std::uint32_t half = h == 0 ? two & 0xffffu : two >> 16;
      most[2 * p + h] =
          bf16 ? half << 16 : __float_as_uint(f16_to_f32(static_cast<std::uint16_t>(half)));
    }
  }
  DeviceFp8Scale scale[n];
  find_scales<n>(most, scale);
#pragma unroll
  for (int c = 0; c < n; ++c) {
    const float factor = scale[c].factor;
    scales[c] = scale[c].scale;
    const auto rounded = [&](std::uint32_t word) {
      const float low = bf16 ? __uint_as_float(word << 16)
                             : f16_to_f32(static_cast<std::uint16_t>(word & 0xffffu));
      const float high = bf16 ? __uint_as_float(word & 0xffff0000u)
                              : f16_to_f32(static_cast<std::uint16_t>(word >> 16));
      return to_e4m3x2(__fmul_rn(low, factor), __fmul_rn(high, factor));
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      q[c][i] = rounded(x[c][2 * i]) | rounded(x[c][2 * i + 1]) << 16;
    }
  }
}

}  // namespace shunt::cuda_engine

#endif
