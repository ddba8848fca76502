// dense3's 64 numbers for products with rows in blocks of integers.
#pragma once

#include <cstdint>

#include "gemm/fixed_rows.hpp"

namespace shunt::cpu_engine {

// With fixed_dense3_more more.
struct Dense3Positive {
  alignas(64) std::uint8_t numbers[64];
  constexpr Dense3Positive() : numbers{} {
    for (int i = 0; i < 64; ++i) {
      numbers[i] = static_cast<std::uint8_t>(dense3_numbers[i] + fixed_dense3_more);
    }
  }
};
inline constexpr Dense3Positive dense3_positive;

}  // namespace shunt::cpu_engine
