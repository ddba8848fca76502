// What the two files of the CUDA gather share: which rows go where, for any contents of memory that
// only the device can see. For .cu files.
#pragma once

#include <cstdint>

#include "cuda/move_rows.cuh"
#include "order/engine.hpp"

namespace shunt {

// n / divisor for 0 <= n < 2^31 by a multiplication.
struct Divisor {
  std::uint32_t divisor = 1, factor = 0;
  int shift = 31;

  explicit Divisor(std::uint32_t d) : divisor(d) {
    while ((std::uint64_t{1} << (shift - 31)) < d) ++shift;
    factor = static_cast<std::uint32_t>((std::uint64_t{1} << shift) / d + 1);
  }
  __device__ std::int32_t operator()(std::int32_t n) const {
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(n) * factor) >> shift);
  }
};

// Each row's token.
struct PermutationMap {
  const std::int32_t* permutation;  // null: pair r is row r
  const std::int32_t* count;        // null: all
  const float* weights;             // null: 1
  std::int32_t pairs;
  Divisor slots;

  __device__ std::int64_t items() const {
    return count != nullptr ? min(max(*count, 0), pairs) : pairs;
  }
  __device__ cuda_engine::MoveItem item(std::int64_t row) const {
    const std::int32_t pair =
        permutation != nullptr ? permutation[row] : static_cast<std::int32_t>(row);
    const float weight = weights != nullptr ? weights[row] : 1.0f;
    if (pair < 0 || pair >= pairs) return {};
    return {slots(pair), row, weight};
  }
};

// Each token's rows.
struct InverseMap {
  const std::int32_t* inverse;
  const std::int32_t* count;
  const float* weights;
  std::int32_t pairs;
  int targets;
  std::int64_t tokens;

  __device__ std::int32_t row_count() const { return min(*count, pairs); }
  __device__ std::int32_t target(std::int64_t i) const { return inverse[i]; }
  __device__ float weight(std::int32_t row) const {
    return weights != nullptr ? weights[row] : 1.0f;
  }
};

void gather_quantised_cuda(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                           const Tensor& rows, const Tensor& scales, const PermutationMap& by_row,
                           const InverseMap& by_token);

}  // namespace shunt
