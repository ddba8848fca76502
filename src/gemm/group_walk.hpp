// Which rows each group has: one source of truth for the reference and both engines.
#pragma once

#include <cstdint>

#ifndef SHUNT_BOTH
#ifdef __CUDACC__
#define SHUNT_BOTH __host__ __device__
#else
#define SHUNT_BOTH
#endif
#endif

namespace shunt {

struct GroupRows {
  std::int64_t begin = 0, end = 0;
};

struct GroupWalk {
  // [groups + 1]. Null: group g has room for `capacity` rows from g * capacity on, of which the
  // first counts[g] are there, or all where `counts` is null too.
  const std::int32_t* offsets = nullptr;
  const std::int32_t* counts = nullptr;  // [groups]
  std::int64_t rows = 0;                 // of all groups, at most
  std::int64_t capacity = 0;             // 0 where there are offsets

  // Of a product of `rows` rows.
  SHUNT_BOTH static GroupWalk of_rows(const std::int32_t* offsets, const std::int32_t* counts,
                                      int groups, std::int64_t rows) {
    return {offsets, counts, rows, offsets == nullptr ? rows / groups : 0};
  }
  // Whatever the numbers are, a part of [0, rows).
  SHUNT_BOTH GroupRows of(int group) const {
    if (offsets == nullptr) {
      const std::int64_t begin = group * capacity;
      return {begin, begin + (counts == nullptr ? capacity : clamp(counts[group], 0, capacity))};
    }
    const std::int64_t begin = clamp(offsets[group], 0, rows);
    return {begin, clamp(offsets[group + 1], begin, rows)};
  }

 private:
  SHUNT_BOTH static std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
    return x < low ? low : x > high ? high : x;
  }
};

}  // namespace shunt
