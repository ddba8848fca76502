// What the cost models of grouped GEMMs share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace shunt::cuda_engine {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of `groups`, those that have some of `rows`, where routing is uniform.
inline double groups_with_rows(double groups, double rows) {
  if (groups <= 1 || rows <= 1) return std::min(groups, rows);
  return groups * (1 - std::pow(1 - 1 / groups, rows));
}

}  // namespace shunt::cuda_engine
