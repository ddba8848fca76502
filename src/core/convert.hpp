// Scalar conversions between f32 and shorter floats, round to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

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

// f32 or f64 as e4m3, which has no infinities: everything beyond the range, infinities too, becomes
// +-448; NaN is 0x7f.
template <class Float>
inline std::uint8_t to_e4m3(Float value) {
  using Limits = std::numeric_limits<Float>;
  using Bits = std::conditional_t<sizeof(Float) == 4, std::uint32_t, std::uint64_t>;
  static_assert(Limits::is_iec559 && sizeof(Float) == sizeof(Bits));
  constexpr int width = 8 * sizeof(Bits), mantissa = Limits::digits - 1, dropped = mantissa - 3;
  constexpr auto bits_of = [](Float x) { return std::bit_cast<Bits>(x); };
  constexpr auto power = [](int exponent) {
    return static_cast<Float>(std::uint64_t{1} << exponent);
  };
  const Bits bits = bits_of(value), magnitude = bits & ~(Bits{1} << (width - 1));
  const auto sign = static_cast<Bits>(bits >> (width - 8) & 0x80);
  if (magnitude > bits_of(Limits::infinity())) return 0x7f;
  if (magnitude >= bits_of(448)) return static_cast<std::uint8_t>(sign | 0x7e);
  if (magnitude < bits_of(1 / power(6))) {  // subnormal: the addition rounds at 2^-9
    const Float shift = power(mantissa - 9), shifted = std::bit_cast<Float>(magnitude) + shift;
    return static_cast<std::uint8_t>(sign | (bits_of(shifted) - bits_of(shift)));
  }
  const Bits rounded = magnitude + ((Bits{1} << (dropped - 1)) - 1) + (magnitude >> dropped & 1);
  return static_cast<std::uint8_t>(sign | (rounded - bits_of(1 / power(7))) >> dropped);
}

inline float e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t rest = bits & 0x7fu;
  if (rest == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  // As f16: the exponent is 120 too small until the product, which also normalises subnormals.
  const float magnitude = std::bit_cast<float>(rest << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

// Element i of a dense array of f32 | bf16 | f16 | f64 | f8_e4m3.
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
    case DType::f8_e4m3:
      return e4m3_to_f32(static_cast<const std::uint8_t*>(data)[i]);
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
    case DType::f8_e4m3:
      static_cast<std::uint8_t*>(data)[i] = to_e4m3(value);
      break;
    default:
      break;
  }
}

}  // namespace shunt
