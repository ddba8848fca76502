// dense3's 64 numbers as integers of two bytes, for rows in blocks of integers.
#pragma once

#include <cstdint>

#include "format/dense3.hpp"
#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine {

// Of each, with fixed_dense3_more times 256 more, the upper byte and the lower; and the upper one
// with that taken off again, signed.
struct Dense3Integers {
  alignas(64) std::uint8_t upper[64];
  alignas(64) std::uint8_t lower[64];
  alignas(64) std::int8_t signed_upper[64];
  constexpr Dense3Integers() : upper{}, lower{}, signed_upper{} {
    for (std::size_t i = 0; i < 64; ++i) {
      const int n = static_cast<int>(dense3_values[i] / fixed_dense3_unit);
      const int more = n + 256 * fixed_dense3_more;
      upper[i] = static_cast<std::uint8_t>(more >> 8);
      lower[i] = static_cast<std::uint8_t>(more);
      signed_upper[i] = static_cast<std::int8_t>((more >> 8) - fixed_dense3_more);
    }
  }
};
inline constexpr Dense3Integers dense3_integers;

constexpr bool dense3_values_are_integers() {
  for (const float value : dense3_values) {
    const float n = value / fixed_dense3_unit;
    if (n != static_cast<float>(static_cast<int>(n)) || n < -26880 || n > 26880) return false;
  }
  return true;
}
static_assert(dense3_values_are_integers());

}  // namespace shunt::cpu_engine
