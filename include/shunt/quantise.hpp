// Rows as fp8 with scales of their own: what gather and activate write for a grouped GEMM in fp8.
#pragma once

#include <cstdint>

namespace shunt {

// Which values share a scale where rows are written as fp8 e4m3: all of a row, or 128 consecutive
// columns (the last block may be shorter).
enum class Quantise : std::int32_t { none = 0, row = 1, block_128 = 2 };

// A quantised value q stands for q * scale. Of the values x that share a scale (rounded to f32):
//   amax   = the largest |x| that is finite, at most scale_upper_bound, at least 1e-12
//   scale  = amax / 448, or the power of two at or above that
//   q      = e4m3(x * (448 / amax)), or e4m3(x / scale) with power_of_two_scales
// to nearest even, saturating: infinities and what exceeds the bound become +-448; NaN stays NaN
// (0x7f) and moves no scale.
struct QuantiseSpec {
  Quantise quantise = Quantise::none;
  float scale_upper_bound = 0;  // of amax; 0: none; finite
  bool power_of_two_scales = false;
  bool operator==(const QuantiseSpec&) const = default;
};

}  // namespace shunt
