// NVFP4: e2m1 with an e4m3 scale for 16 of k and one f32 scale a matrix.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "format/grouped.hpp"

namespace shunt {

namespace {

constexpr std::uint8_t e4m3_one = 0x38, e4m3_least = 0x01, e4m3_largest = 0x7E;

// Fitted scales are so many e4m3 below the rule's or above it: from where 6 has to stand for a
// little more to where 4, or 3.5, stands for the largest value. Further ones are never the best of
// normal values.
constexpr int fit_below = 2, fit_above = 7;

struct Nvfp4 : E2m1Codes {
  static constexpr DType stored_scale = DType::f8_e4m3;
  static constexpr std::int64_t group = 16;
  static std::uint8_t scale_byte(const PackedMatrix& m, const float* values, std::int64_t count) {
    return nvfp4_block_scale(largest(values, count), m.global_scale);
  }
  static double scale(const PackedMatrix& m, std::uint8_t byte) {
    return static_cast<double>(e4m3_to_f32(byte)) * static_cast<double>(m.global_scale);
  }
};

}  // namespace

std::uint8_t nvfp4_block_scale(float amax, float global) {
  if (amax == 0) return e4m3_one;
  const std::uint8_t code = to_e4m3(static_cast<double>(amax), 6 * static_cast<double>(global));
  return std::max(code, e4m3_least);
}

std::uint8_t nvfp4_fitted_scale(const float* values, std::int64_t count, float global) {
  const std::uint8_t rule = nvfp4_block_scale(largest(values, count), global);
  constexpr std::size_t at_once = 8;  // by vectors
  // Zeros have no error by any scale.
  std::array<double, most_fitted> magnitudes{};
  std::size_t some = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (values[i] != 0) magnitudes[some++] = std::fabs(static_cast<double>(values[i]));
  }
  // Less than `most`, or anything else.
  const auto squared_error = [&](int code, double most) {
    const double scale = static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(code))) *
                         static_cast<double>(global);
    double sum = 0;
    for (std::size_t begin = 0; begin < some && sum < most; begin += at_once) {
      std::array<double, at_once> squares;
      for (std::size_t i = 0; i < at_once; ++i) {
        const double m = magnitudes[begin + i], error = e2m1_magnitude(m, scale) * scale - m;
        squares[i] = error * error;
      }
      for (const double square : squares) sum += square;
    }
    return sum;
  };
  int best = rule;
  double least = squared_error(rule, std::numeric_limits<double>::infinity());
  const int first = std::max(rule - fit_below, static_cast<int>(e4m3_least));
  const int last = std::min(rule + fit_above, static_cast<int>(e4m3_largest));
  for (int code = first; code <= last; ++code) {
    const double error = squared_error(code, least);
    if (error < least) {
      least = error;
      best = code;
    }
  }
  return static_cast<std::uint8_t>(best);
}

float nvfp4_global_scale(float amax) { return scale_for(amax, 6 * 448); }

const FormatRules nvfp4_rules = {{Format::nvfp4},
                                 Grouped<Nvfp4>::tensors,
                                 nvfp4_global_scale,
                                 Grouped<Nvfp4>::encode,
                                 Grouped<Nvfp4>::decode};

}  // namespace shunt
