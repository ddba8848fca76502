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

// Tiles of `tokens` rows that one of `groups` makes, `mean` rows in the mean, where groups are
// drawn: the chances that it has more rows than one, two, .. of them.
inline double tiles_of_group(int groups, double mean, int tokens) {
  if (groups == 1) return std::ceil(mean / tokens);
  double down = 1;
  for (int nth = 1; nth < 64; ++nth) {
    const double more = std::erfc((nth * tokens + 0.5 - mean) / std::sqrt(2 * mean)) / 2;
    if (more < 1e-3) break;
    down += more;
  }
  return down + (mean > 64 * tokens ? mean / tokens - 64 : 0);
}

// How often a group's weights cross memory that so many tiles read: after the first time most of
// them are in the L2.
inline double reads_of_weights(double tiles) { return 1 + 0.3 * (tiles - 1); }

}  // namespace shunt::cuda_engine
