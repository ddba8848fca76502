// Scales of fp8 e4m3: a value is stored as e4m3(value * factor) and means that times scale.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/convert.hpp"
#include "shunt/error.hpp"
#include "shunt/quantise.hpp"
#include "shunt/tensor.hpp"

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

// Each field, and all of them together.
Support legal(const QuantiseSpec& spec);

// f32, [rows] or [rows, ceil(width / 128)], apart from one another. Throws Error naming `name`.
void check_scales(const std::string& name, const Tensor& scales, Quantise quantise,
                  std::int64_t rows, std::int64_t width, Device device);

// One row of n values as fp8. read(h, count, values) computes values [h, h + count), 128 at most;
// with a scale a row it is called twice for each. scales: of the row, `step` elements apart.
template <class Read>
void quantise_row(const QuantiseSpec& spec, std::size_t n, std::uint8_t* to, float* scales,
                  std::int64_t step, const Read& read) {
  constexpr std::size_t strip = 128;
  float values[strip];
  const auto strip_at = [&](std::size_t h) {
    const std::size_t count = std::min(strip, n - h);
    read(h, count, values);
    return count;
  };
  const auto amax_of = [&](std::size_t count) {
    float amax = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float size = std::abs(values[i]);
      if (std::isfinite(size)) amax = std::max(amax, size);
    }
    return amax;
  };
  const auto scale_of = [&](float amax) {
    return fp8_scale(amax, spec.scale_upper_bound, spec.power_of_two_scales);
  };
  Fp8Scale scale;
  if (spec.quantise == Quantise::row) {
    float amax = 0;
    for (std::size_t h = 0; h < n; h += strip) amax = std::max(amax, amax_of(strip_at(h)));
    scale = scale_of(amax);
    *scales = scale.scale;
  }
  for (std::size_t h = 0; h < n; h += strip) {
    const std::size_t count = strip_at(h);
    if (spec.quantise == Quantise::block_128) {
      scale = scale_of(amax_of(count));
      scales[static_cast<std::int64_t>(h / strip) * step] = scale.scale;
    }
    for (std::size_t i = 0; i < count; ++i) to[h + i] = to_e4m3(values[i] * scale.factor);
  }
}

}  // namespace shunt
