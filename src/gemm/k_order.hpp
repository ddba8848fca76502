// Where a matrix has group_of: its k in order of their groups, as every engine prepares them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/shape.hpp"
#include "shunt/format.hpp"

namespace shunt {

// to[i]: which of k stands at place i, [k] in all. Every k, those of a group together, each where
// its group is full (prepare_packed() has seen that groups are). Without group_of: as they are.
inline void write_k_order(const PackedMatrix& m, std::int32_t* to) {
  const std::int64_t group = m.format.group;
  const auto* const of = m.group_of.as<const std::int32_t>();
  std::vector<std::int64_t> next(static_cast<std::size_t>(groups_of(m.k, group)));
  for (std::size_t g = 0; g < next.size(); ++g) next[g] = static_cast<std::int64_t>(g) * group;
  for (std::int64_t k = 0; k < m.k; ++k) {
    const std::int64_t g = of != nullptr ? of[k] : k / group;
    to[next[static_cast<std::size_t>(g)]++] = static_cast<std::int32_t>(k);
  }
}

// Whether an order, which a file may have damaged, names places of a row of k only.
inline bool follows_k(const char* order, std::int64_t k) {
  for (std::int64_t i = 0; i < k; ++i) {
    std::int32_t at = 0;
    std::memcpy(&at, order + 4 * i, sizeof at);
    if (at < 0 || at >= k) return false;
  }
  return true;
}

}  // namespace shunt
