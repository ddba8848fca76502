// The code book of dense3 (format/dense3.hpp) as bf16, for files that are compiled for one
// instruction set.
#pragma once

#include <cstdint>

#include "format/dense3_numbers.hpp"

namespace shunt::cpu_engine {

struct Dense3Bf16 {
  // The first number is padding: a reader of words may begin one before the table.
  alignas(64) std::uint16_t padded[65];
  // Their bytes apart, for look-ups of bytes.
  alignas(64) std::uint8_t lower[64], upper[64];
  constexpr Dense3Bf16() : padded{}, lower{}, upper{} {
    for (int i = 0; i < 64; ++i) {
      const float value = static_cast<float>(dense3_numbers[i]) * dense3_unit;
      const auto bits = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, value) >> 16);
      padded[i + 1] = bits;
      lower[i] = static_cast<std::uint8_t>(bits & 0xff);
      upper[i] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
};
inline constexpr Dense3Bf16 dense3_bytes_of_bf16;
inline constexpr const std::uint16_t* dense3_bf16 = dense3_bytes_of_bf16.padded + 1;

}  // namespace shunt::cpu_engine
