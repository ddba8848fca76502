// Exponentials and quotients of weights in fewer instructions than policy.hpp's, with the same
// bits: short where no operand is near the end of its range, elsewhere a call that is not inlined.
#pragma once

#include "route/rows.cuh"

namespace shunt::routing {

// exp_of_negative() where the result is a normal number, x > -87: the same bits, in less.
__device__ __forceinline__ float exp_of_small_negative(float x) {
  constexpr float shift = 0x1.8p+23F;
  const float shifted = fused(x, 0x1.715476p+0F, shift);
  const float n = shifted - shift;
  const float r = fused(n, -0x1.7f7d1cp-20F, fused(n, -0x1.62e4p-1F, x));
  float p = 0x1.6a23d0p-10F;
  p = fused(p, r, 0x1.123a20p-7F);
  p = fused(p, r, 0x1.5558f2p-5F);
  p = fused(p, r, 0x1.555492p-3F);
  p = fused(p, r, 0x1.fffffcp-2F);
  p = fused(p, r * r, r) + 1.0F;
  return float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits_of(p)) +
                                            (static_cast<std::uint32_t>(bits_of(shifted)) << 23)));
}

__device__ __noinline__ inline float exp_of_very_negative(float x) { return exp_of_negative(x); }
__device__ __noinline__ inline float quotient_of_small(float a, float b) { return a / b; }
// exp_of_negative() for any x <= 0.
__device__ __forceinline__ float exp_of_mostly_small(float x) {
  float e = exp_of_small_negative(x);
  if (x <= -86.0F) [[unlikely]]
    e = exp_of_very_negative(x);
  return e;
}
// As the compiler divides: a reciprocal, for any number of divisions by b, and a / b by it. b in
// [1, 64]; a in [0, 1], not tiny or b 1.
__device__ __forceinline__ float reciprocal(float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return fused(r, fused(-b, r, 1.0F), r);
#else
  return 1 / b;
#endif
}
__device__ __forceinline__ float quotient(float a, float b,
                                          [[maybe_unused]] float reciprocal_of_b) {
#if defined(__CUDA_ARCH__)
  const float about = a * reciprocal_of_b;
  return fused(reciprocal_of_b, fused(-b, about, a), about);
#else
  return a / b;
#endif
}
// a[i] / b for b in [1, 64] and a[i] in [0, 1].
template <int n>
__device__ __forceinline__ void divide_by(float (&a)[n], float b) {
  const float r = reciprocal(b);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    float x = quotient(a[i], b, r);
    if (a[i] < 0x1p-60F) [[unlikely]]
      x = quotient_of_small(a[i], b);
    a[i] = x;
  }
}

// Whether a difference is below zero or -0. Of NaN, which has no sign on a GPU, 0.
__device__ __forceinline__ std::uint32_t sign_of(float difference) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(bits_of(difference)) >> 31;
#else
  return std::signbit(difference) && difference == difference ? 1 : 0;
#endif
}

}  // namespace shunt::routing
