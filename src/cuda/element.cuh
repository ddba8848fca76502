// Numbers in device code: f32 | bf16 | f16 elements as f32 and back, as core/convert.hpp does it on
// the host: to nearest even, f16 saturating, infinities and NaN kept.
#pragma once

#include <cstdint>

#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

__device__ __forceinline__ float bf16_to_f32(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}
__device__ __forceinline__ std::uint16_t f32_to_bf16(float x) {
  std::uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ float f16_to_f32(std::uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ std::uint16_t f32_to_f16(float x) {
  // A comparison with NaN is false; infinities are left as they are.
  if (fabsf(x) > 65504.0f && fabsf(x) < __int_as_float(0x7f800000)) x = copysignf(65504.0f, x);
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Element i of an array of f32 | bf16 | f16.
__device__ __forceinline__ float load_element(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
__device__ __forceinline__ void store_element(void* data, DType dtype, std::int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<std::uint16_t*>(data)[i] = dtype == DType::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
  }
}

}  // namespace shunt::cuda_engine
