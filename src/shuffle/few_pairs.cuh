// Which row goes where, for few (rank, expert) pairs, found by one warp in registers.
//
// Lane l has pairs 4 l .. 4 l + 3, in the order of ranks and in that of experts. Two sums over the
// warp, side by side, give where each pair's rows begin in either order; how many begins of the
// order that is written are at or below a row says which pair has it. Counts below 0 are 0; where
// there are more rows than room, counts past the last row go, and the second sum is done again.
//
// Time: 300 to 400 clocks after the counts are there.
#pragma once

#include <cstdint>

namespace shunt::cuda_engine {

constexpr int most_few_pairs = 128;
constexpr int pairs_of_lane = most_few_pairs / 32;
constexpr std::int64_t most_few_rows = 1 << 30;  // so that sums fit
constexpr int most_found_rows = 32;              // by one find_rows()

struct FewPairs {
  const std::int32_t* token_counts;
  std::int32_t* counts;  // null: not asked for
  int ranks, experts, first, end;
  std::int32_t rows;
  std::uint32_t by_rank, by_expert;  // pair_reciprocal()
  bool combines, zero_fill;

  __host__ __device__ int pairs() const { return ranks * experts; }
  __host__ __device__ int moved() const { return (end - first) * ranks; }
};

// x / d is x * pair_reciprocal(d) >> 16 for x and d up to 128.
constexpr std::uint32_t pair_reciprocal(int d) {
  return (65535 + static_cast<std::uint32_t>(d)) / static_cast<std::uint32_t>(d);
}
__device__ __forceinline__ int divided(int x, std::uint32_t by) {
  return static_cast<int>(static_cast<std::uint32_t>(x) * by >> 16);
}

struct alignas(16) PairTables {
  std::int32_t ranked[most_few_pairs];  // where pair r E + e begins in the order of ranks
  std::int32_t sorted[most_few_pairs];  // where pair (e - first) EP + r does in that of experts
  std::int32_t all_sorted;              // rows of the experts that are moved
  std::int32_t from[most_found_rows];   // of each row: the row to read; -1: none; -2: zeros
};

// The sums before each of a lane's numbers, and of all, none above `most`.
__device__ __forceinline__ std::uint32_t sums_before(const std::uint32_t (&n)[pairs_of_lane],
                                                     std::uint32_t most, int lane,
                                                     std::uint32_t (&before)[pairs_of_lane]) {
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < pairs_of_lane; ++i) sum = min(sum + n[i], most);
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const std::uint32_t other = __shfl_up_sync(0xffffffffu, sum, apart);
    if (lane >= apart) sum = min(sum + other, most);
  }
  const std::uint32_t all = __shfl_sync(0xffffffffu, sum, 31);
  std::uint32_t at = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) at = 0;
#pragma unroll
  for (int i = 0; i < pairs_of_lane; ++i) {
    before[i] = at;
    at = min(at + n[i], most);
  }
  return all;
}

// Fills `tables`, `from` for `count` rows that are written from `first` on. By one warp, whose
// lanes see what it wrote once they have met.
__device__ __forceinline__ void find_rows(const FewPairs& call, PairTables& tables,
                                          std::int32_t first, int count, int lane) {
  const int pairs = call.pairs(), moved = call.moved();
  const auto rows = static_cast<std::uint32_t>(call.rows);
  std::uint32_t given[pairs_of_lane], local[pairs_of_lane];
  int pair_of[pairs_of_lane];  // that is the lane's in the order of experts
#pragma unroll
  for (int i = 0; i < pairs_of_lane; ++i) {
    const int p = lane * pairs_of_lane + i, e = divided(p, call.by_rank);
    pair_of[i] = (p - e * call.ranks) * call.experts + call.first + e;
    const std::int32_t a = p < pairs ? call.token_counts[p] : 0;
    const std::int32_t b = p < moved ? call.token_counts[pair_of[i]] : 0;
    given[i] = static_cast<std::uint32_t>(min(max(a, 0), call.rows));
    local[i] = static_cast<std::uint32_t>(min(max(b, 0), call.rows));
  }
  std::uint32_t ranked[pairs_of_lane], sorted[pairs_of_lane];
  std::uint32_t all = sums_before(given, rows + 1, lane, ranked);
  std::uint32_t all_sorted = sums_before(local, rows + 1, lane, sorted);
  if (all > rows) {
#pragma unroll
    for (int i = 0; i < pairs_of_lane; ++i) {
      ranked[i] = min(ranked[i], rows);
      tables.ranked[lane * pairs_of_lane + i] =
          static_cast<std::int32_t>(min(given[i], rows - ranked[i]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < pairs_of_lane; ++i) {
      const int p = lane * pairs_of_lane + i;
      local[i] = p < moved ? static_cast<std::uint32_t>(tables.ranked[pair_of[i]]) : 0;
    }
    __syncwarp();
    all = rows;
    all_sorted = sums_before(local, rows + 1, lane, sorted);
  }
  std::int32_t begin[pairs_of_lane];  // in the order that is written
#pragma unroll
  for (int i = 0; i < pairs_of_lane; ++i) {
    const int p = lane * pairs_of_lane + i;
    tables.ranked[p] = static_cast<std::int32_t>(ranked[i]);
    tables.sorted[p] = static_cast<std::int32_t>(sorted[i]);
    begin[i] = static_cast<std::int32_t>(call.combines ? sorted[i] : ranked[i]);
    if (p >= (call.combines ? moved : pairs)) begin[i] = INT32_MAX;
  }
  if (lane == 0) tables.all_sorted = static_cast<std::int32_t>(all_sorted);
  int found = 0;  // the pair of row first + lane, in the order that is written
  for (int i = 0; i < count; ++i) {
    int n = -1;
#pragma unroll
    for (int j = 0; j < pairs_of_lane; ++j) {
      n += __popc(__ballot_sync(0xffffffffu, begin[j] <= first + i));
    }
    found = lane == i ? n : found;
  }
  __syncwarp();
  if (lane >= count) return;
  const std::int32_t row = first + lane;
  std::int32_t from = call.zero_fill ? -2 : -1;
  if (row < static_cast<std::int32_t>(call.combines ? all_sorted : all)) {
    if (call.combines) {
      const int e = divided(found, call.by_rank);
      const int pair = (found - e * call.ranks) * call.experts + call.first + e;
      from = tables.ranked[pair] + row - tables.sorted[found];
    } else {
      const int r = divided(found, call.by_expert), e = found - r * call.experts;
      if (e >= call.first && e < call.end) {
        from = tables.sorted[(e - call.first) * call.ranks + r] + row - tables.ranked[found];
      }
    }
  }
  tables.from[lane] = row < call.rows ? from : -1;
}

// Rows of each expert that is moved, and of all, once `tables` are filled. By one warp.
__device__ __forceinline__ void store_counts(const FewPairs& call, const PairTables& tables,
                                             int lane) {
  const int locals = call.end - call.first;
  for (int e = lane; e < locals; e += 32) {
    const int begin = e * call.ranks, next = begin + call.ranks;
    const std::int32_t end = e + 1 == locals ? tables.all_sorted : tables.sorted[next];
    call.counts[e] = end - tables.sorted[begin];
  }
  if (lane == 0) call.counts[locals] = tables.all_sorted;
}

}  // namespace shunt::cuda_engine
