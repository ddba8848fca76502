// What plans are made of for a product whose rows are rounded to fp8.
#pragma once

#include <cstdint>

#include "gemm/packed_layout.hpp"
#include "gemm/packed_plan.hpp"

namespace shunt::cuda_engine {

// `rounded`: its rows are fp8 already and lie in order; others are rounded on the way.
inline PackedSizes fp8_sizes(const PackedLayout& layout, int groups, std::int64_t rows,
                             bool rounded) {
  return {.groups = groups,
          .rows = rows,
          .group_rows = layout.rows(),
          .k = layout.k,
          .packed_rows = rounded,
          .rows_in_place = rounded};
}

}  // namespace shunt::cuda_engine
