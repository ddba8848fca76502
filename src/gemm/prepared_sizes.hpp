// What may be prepared: the one check of its sizes.
#pragma once

#include <cstdint>

#include "core/check.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Throws Error{invalid_argument} for `groups` matrices [n, k] (n counts gate and up when paired)
// that no layout holds, so that no later product of these sizes overflows.
inline void check_prepared_sizes(const char* what, DType dtype, int groups, std::int64_t n,
                                 std::int64_t k, bool paired) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    fail(Status::invalid_argument, "{}: dtype is {}: must be f32, bf16 or f16", what,
         to_string(dtype));
  }
  if (groups < 0) fail(Status::invalid_argument, "{}: groups is {}: must be >= 0", what, groups);
  if (n < 0) fail(Status::invalid_argument, "{}: n is {}: must be >= 0", what, n);
  if (k < 0) fail(Status::invalid_argument, "{}: k is {}: must be >= 0", what, k);
  if (paired && n % 2 != 0) {
    fail(Status::invalid_argument, "{}: n is {}: must be even when gate and up are paired", what,
         n);
  }
  // Four bytes an element, and what layouts fill up.
  const double bytes = static_cast<double>(groups) * (static_cast<double>(n) + 256) *
                       (static_cast<double>(k) + 256) * 4;
  if (bytes > 0x1p62) {
    fail(Status::invalid_argument, "{}: {} matrices [{}, {}] do not fit 64-bit sizes", what, groups,
         n, k);
  }
}

}  // namespace shunt
