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

// By how much of their mean groups' rows differ beside what chance does. No routing is quite
// uniform, so that tiles for few rows are chosen for some more; those for many rows of packed
// weights would lose more where it is than they gain where it is not (docs/notes/cuda-gemm.md,
// "Routing that is not uniform").
inline constexpr double uneven = 0.4, uniform = 0;

// The deviation of a group's rows.
inline double deviation(int groups, double mean, double unevenness = uneven) {
  return groups > 1 ? std::sqrt(mean + unevenness * unevenness * mean * mean) : 0;
}

// Tiles of `tokens` rows that one of `groups` makes, `mean` rows in the mean, where groups are
// drawn: the chances that it has more rows than one, two, .. of them.
inline double tiles_of_group(int groups, double mean, int tokens, double unevenness = uneven) {
  if (groups == 1) return std::ceil(mean / tokens);
  const double away = deviation(groups, mean, unevenness);
  double down = 1;
  for (int nth = 1; nth < 64; ++nth) {
    const double more = std::erfc((nth * tokens + 0.5 - mean) / (std::sqrt(2.0) * away)) / 2;
    if (more < 1e-3) break;
    down += more;
  }
  return down + (mean > 64 * tokens ? mean / tokens - 64 : 0);
}

// How often a group's weights cross memory that so many tiles read: after the first time most of
// them are in the L2.
inline double reads_of_weights(double tiles) { return 1 + 0.3 * (tiles - 1); }

}  // namespace shunt::cuda_engine
