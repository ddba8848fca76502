// fp8 e4m3 in device code: the bits of core/convert.hpp and core/quantise.hpp.
#pragma once

#include <cstdint>

namespace shunt::cuda_engine {

// Two values to a half-word, `low` in its low byte.
__device__ __forceinline__ std::uint32_t to_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto one = [](float value) -> std::uint32_t {
    const std::uint32_t bits = __float_as_uint(value);
    const std::uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude >= 0x43e00000u) return sign | 0x7eu;
    if (magnitude < 0x3c800000u) {
      return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u);
    }
    return sign | ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u) >> 20);
  };
  return one(low) | one(high) << 8;
#endif
}

struct DeviceFp8Scale {
  float scale, factor;
};

__device__ __forceinline__ DeviceFp8Scale device_fp8_scale(float amax, float upper_bound,
                                                           bool power_of_two) {
  if (upper_bound > 0) amax = fminf(amax, upper_bound);
  amax = fmaxf(amax, 1e-12f);
  const float scale = __fdiv_rn(amax, 448.0f);
  if (!power_of_two) return {scale, __fdiv_rn(448.0f, amax)};
  const float up = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u);
  return {up, __fdiv_rn(1.0f, up)};
}

}  // namespace shunt::cuda_engine
