// Scales of fp8 e4m3: a value is stored as e4m3(value * factor) and means that times scale.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace shunt {

struct Fp8Scale {
  float scale = 1, factor = 1;
};

// A row of zeros, or of numbers too small for the division, has a scale that is a normal number.
inline constexpr float least_amax = 1e-12f;
inline constexpr float e4m3_max = 448;

// amax: the largest finite magnitude; upper_bound: 0 for none.
inline Fp8Scale fp8_scale(float amax, float upper_bound, bool power_of_two) {
  if (upper_bound > 0) amax = std::min(amax, upper_bound);
  amax = std::max(amax, least_amax);
  const float scale = amax / e4m3_max;
  if (!power_of_two) return {scale, e4m3_max / amax};
  const auto up = (std::bit_cast<std::uint32_t>(scale) + 0x7fffffu) & 0xff800000u;
  return {std::bit_cast<float>(up), 1 / std::bit_cast<float>(up)};
}

}  // namespace shunt
