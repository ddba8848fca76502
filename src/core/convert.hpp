// Scalar conversions between f32 and the 16-bit floats, round to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "shunt/tensor.hpp"

namespace shunt {

inline float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t f32_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // A NaN must not round to infinity.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  }
  // Shifting the exponent leaves it 112 too small; the product also normalises subnormals.
  const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

// Finite values beyond the range saturate to +-65504; infinities and NaN stay what they are.
inline std::uint16_t f32_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude == 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x477fe000u) return static_cast<std::uint16_t>(sign | 0x7bffu);
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Element i of a dense array of f32 | bf16 | f16 | f64.
inline float load_f32(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case DType::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case DType::f64:
      return static_cast<float>(static_cast<const double*>(data)[i]);
    default:
      return std::nanf("");
  }
}

inline void store_f32(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[i] = value;
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_bf16(value);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_f16(value);
      break;
    case DType::f64:
      static_cast<double*>(data)[i] = static_cast<double>(value);
      break;
    default:
      break;
  }
}

}  // namespace shunt
