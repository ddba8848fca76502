// How many of the rows of a call are there.
#pragma once

#include <cstdint>

namespace shunt::cuda_engine {

// All, or the first *valid of them; may be null.
__device__ __forceinline__ std::int64_t valid_rows(const std::int32_t* valid, std::int64_t rows) {
  if (valid == nullptr) return rows;
  const std::int64_t count = *valid;
  return count < 0 ? 0 : count < rows ? count : rows;
}

}  // namespace shunt::cuda_engine
