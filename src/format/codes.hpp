// The short floats that formats are made of: e2m1, e8m0, and roundings that happen once.
// e4m3 stands in core/convert.hpp.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/convert.hpp"

namespace shunt {

// e2m1: sign, two bits of exponent, one of mantissa.
inline constexpr std::array<float, 16> e2m1_values = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                      4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                      -2.0F, -3.0F, -4.0F, -6.0F};

// The code of value / scale, to nearest, ties to even, saturating. Exact: the bounds between
// neighbours times a scale of 48 bits or less are doubles. scale > 0.
inline std::uint8_t to_e2m1(double value, double scale) {
  const double m = std::fabs(value);
  const int code = static_cast<int>(m > 0.25 * scale) + static_cast<int>(m >= 0.75 * scale) +
                   static_cast<int>(m > 1.25 * scale) + static_cast<int>(m >= 1.75 * scale) +
                   static_cast<int>(m > 2.5 * scale) + static_cast<int>(m >= 3.5 * scale) +
                   static_cast<int>(m > 5.0 * scale);
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

// What that code of a magnitude stands for, before its scale. Without branches, so that loops of it
// become vectors.
inline double e2m1_magnitude(double m, double scale) {
  const auto step = [&](bool beyond, double by) { return beyond ? by : 0.0; };
  return step(m > 0.25 * scale, 0.5) + step(m >= 0.75 * scale, 0.5) + step(m > 1.25 * scale, 0.5) +
         step(m >= 1.75 * scale, 0.5) + step(m > 2.5 * scale, 1) + step(m >= 3.5 * scale, 1) +
         step(m > 5.0 * scale, 2);
}

// e8m0: 2^(code - 127); 255 is NaN.
inline double e8m0_to_f64(std::uint8_t code) {
  if (code == 255) return std::nan("");
  return std::bit_cast<double>(static_cast<std::uint64_t>(code + 1023 - 127) << 52);
}
inline float e8m0_to_f32(std::uint8_t code) { return static_cast<float>(e8m0_to_f64(code)); }
// The scale of the OCP formats: the largest power of two in amax, less that of the largest element
// (e2m1: 2, e4m3: 8), clamped. Zeros have the least scale.
inline std::uint8_t mx_scale(float amax, int element_exponent) {
  if (!(amax > 0)) return 0;
  int exponent = 0;
  std::frexp(amax, &exponent);  // amax in [2^(exponent - 1), 2^exponent)
  const int code = exponent - 1 - element_exponent + 127;
  return static_cast<std::uint8_t>(code < 0 ? 0 : code > 254 ? 254 : code);
}

inline bool e4m3_is_nan(std::uint8_t code) { return (code & 0x7f) == 0x7f; }

// f32 toward zero with the last bit set when that lost anything: what is rounded to 22 bits or less
// from it is rounded as from the double.
inline float to_odd_f32(double value) {
  float near = static_cast<float>(value);
  if (std::isinf(near) && std::isfinite(value)) near = std::nextafterf(near, 0.0F);
  const auto back = static_cast<double>(near);
  if (back == value || !std::isfinite(value)) return near;
  if (std::fabs(back) > std::fabs(value)) near = std::nextafterf(near, 0.0F);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(near) | 1U);
}
// value / scale to nearest even. Exact for f32 operands: a quotient of theirs lies on a bound
// between e4m3 neighbours or is further from it than a double's last place.
inline std::uint8_t to_e4m3(double value, double scale) { return to_e4m3(value / scale); }

inline void store_f64(void* data, DType dtype, std::int64_t i, double value) {
  store_f32(data, dtype, i, dtype == DType::f32 ? static_cast<float>(value) : to_odd_f32(value));
}

}  // namespace shunt
