// The code book of dense3.
//
// A weight has three bits, and means what they and the three bits of the weight before it say: the
// 64 numbers below, times the group's scale. A code thus chooses among eight numbers, and with them
// which eight the next may choose from; over a group the best path is searched (Viterbi). Eight
// sets that interleave make steps finer than eight numbers could be: on normal and on Student-t (5)
// weights the squared error is 0.0224 and 0.0238 of the power, where the best eight numbers for
// groups of 32 leave 0.026 and 0.038. The numbers are means of what chooses them (Lloyd's
// iteration over both distributions, in units of the group's root mean square), rounded to
// multiples of 2^-5 as the iteration ends: integers of eight bits, which loses nothing that four
// digits of these errors show.
#pragma once

#include <array>
#include <cstdint>

#include "format/dense3_numbers.hpp"

namespace shunt {

inline constexpr std::int64_t dense3_group = 32;
inline constexpr std::int64_t dense3_group_bytes = 12;

inline constexpr std::array<float, 64> dense3_values = [] {
  std::array<float, 64> values{};
  for (std::size_t w = 0; w < values.size(); ++w) {
    values[w] = static_cast<float>(dense3_numbers[w]) * dense3_unit;
  }
  return values;
}();
inline constexpr float dense3_most = [] {  // of their magnitudes
  float most = 0;
  for (const float value : dense3_values)
    most = value > most ? value : value < -most ? -value : most;
  return most;
}();

// The window of weight i in a group's bytes, little endian: bits 3 (i - 1) to 3 i + 2.
inline int dense3_window(const std::uint8_t* group, std::int64_t i) {
  if (i == 0) return (group[0] & 7) << 3;
  const std::int64_t bit = 3 * (i - 1);
  const int low = group[bit / 8], high = bit / 8 + 1 < dense3_group_bytes ? group[bit / 8 + 1] : 0;
  return (low | high << 8) >> (bit % 8) & 63;
}

}  // namespace shunt
