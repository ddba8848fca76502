// What the readers of quantised tensors ask of one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shunt/tensor.hpp"

namespace shunt {

inline bool plain(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

// Zero points in nibbles: whether all are the usual one, 8, which is none.
inline bool all_words(const Tensor& zeros, std::uint32_t usual) {
  const auto* const words = zeros.as<const std::uint32_t>();
  return std::all_of(words, words + zeros.elements(),
                     [&](std::uint32_t word) { return word == usual; });
}

}  // namespace shunt
