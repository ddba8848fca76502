// The code book of dense3.
//
// A weight has three bits, and means what they and the three bits of the weight before it say: the
// 64 numbers below, times the group's scale. A code thus chooses among eight numbers, and with them
// which eight the next may choose from; over a group the best path is searched (Viterbi). Eight
// sets that interleave make steps finer than eight numbers could be: on normal and on Student-t (5)
// weights the squared error is 0.0221 and 0.0235 of the power, where the best eight numbers for
// groups of 32 leave 0.026 and 0.038. The numbers are means of what chooses them (Lloyd's
// iteration over both distributions, in units of the group's root mean square), rounded to bf16 and
// to multiples of 2^-13, which makes them integers of 16 bits.
#pragma once

#include <array>
#include <cstdint>

namespace shunt {

inline constexpr std::int64_t dense3_group = 32;
inline constexpr std::int64_t dense3_group_bytes = 12;

// By window: the code before in bits 2:0, the code itself in 5:3.
inline constexpr std::array<float, 64> dense3_values = {-2.6875F,         -1.7890625F,
                                                        -2.671875F,       -1.90625F,
                                                        -3.265625F,       -1.828125F,
                                                        -2.546875F,       -1.890625F,
                                                        -1.5390625F,      -0.9609375F,
                                                        -1.3671875F,      -0.83984375F,
                                                        -1.3359375F,      -0.88671875F,
                                                        -1.40625F,        -0.99609375F,
                                                        -0.8671875F,      -0.4296875F,
                                                        -0.80859375F,     -0.34375F,
                                                        -0.78125F,        -0.376953125F,
                                                        -0.8125F,         -0.427734375F,
                                                        -0.3671875F,      -0.0196533203125F,
                                                        -0.390625F,       0.0196533203125F,
                                                        -0.376953125F,    0.0106201171875F,
                                                        -0.361328125F,    0.0062255859375F,
                                                        0.04736328125F,   0.375F,
                                                        -0.01513671875F,  0.3671875F,
                                                        -0.018310546875F, 0.396484375F,
                                                        0.033447265625F,  0.427734375F,
                                                        0.48828125F,      0.82421875F,
                                                        0.3828125F,       0.75F,
                                                        0.34375F,         0.80078125F,
                                                        0.443359375F,     0.9140625F,
                                                        1.0625F,          1.4296875F,
                                                        0.9140625F,       1.3359375F,
                                                        0.859375F,        1.375F,
                                                        0.984375F,        1.5625F,
                                                        2.015625F,        2.625F,
                                                        1.859375F,        3.28125F,
                                                        1.84375F,         2.640625F,
                                                        1.8046875F,       2.75F};

// The window of weight i in a group's bytes, little endian: bits 3 (i - 1) to 3 i + 2.
inline int dense3_window(const std::uint8_t* group, std::int64_t i) {
  if (i == 0) return (group[0] & 7) << 3;
  const std::int64_t bit = 3 * (i - 1);
  const int low = group[bit / 8], high = bit / 8 + 1 < dense3_group_bytes ? group[bit / 8 + 1] : 0;
  return (low | high << 8) >> (bit % 8) & 63;
}

}  // namespace shunt
