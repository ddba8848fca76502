// Questions about shapes that every reader of tensors asks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "shunt/tensor.hpp"

namespace shunt {

// How many groups of `group` hold k; the last may be short.
constexpr std::int64_t groups_of(std::int64_t k, std::int64_t group) {
  return (k + group - 1) / group;
}

inline bool has_shape(const Tensor& tensor, std::span<const std::int64_t> shape) {
  return tensor.rank == static_cast<int>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape.begin());
}
inline bool has_shape(const Tensor& tensor, std::initializer_list<std::int64_t> shape) {
  return has_shape(tensor, std::span(shape.begin(), shape.size()));
}

}  // namespace shunt
