// The first half of the sort of sort.cuh: a warp's own pairs in registers, all others counted.
#pragma once

#include "order/sort_parts.cuh"

namespace shunt::ordering {

// ---- pairs of a warp ---------------------------------------------------------------------------

// `kept` groups of 32 consecutive pairs, a pair of each a lane.
template <int kept>
struct Group {
  std::int32_t expert[kept];  // the id until local() was called; -1: skipped
  std::int32_t rank[kept];    // among the equal ones of the 32
  std::int32_t equal[kept];   // how many these are
  float weight[kept];

  // Pairs [begin, end) of the warp.
  __device__ __forceinline__ void load(const OrderCall& call, bool weighted, std::uint32_t begin,
                                       std::uint32_t end, unsigned lane) {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const std::uint32_t pair = begin + 32 * k + lane;
      expert[k] = -1;
      weight[k] = 0;
      if (pair >= end) continue;
      expert[k] = __ldcg(call.ids + pair);
      if (weighted) weight[k] = __ldcg(call.weights + pair);
    }
  }
  // After load(), once the ids are needed. Pairs past `end` are skipped.
  __device__ __forceinline__ void local(const OrderCall& call, std::uint32_t begin,
                                        std::uint32_t end, unsigned lane) {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      int4 id{expert[k], 0, 0, 0};
      map_ids(call, id);
      const std::uint32_t pair = begin + 32 * k + lane;
      expert[k] = pair < end ? local_expert(call, id.x) : -1;
    }
  }
  // `bits`: of a local expert's index.
  __device__ __forceinline__ void find_ranks(unsigned bits, unsigned lane) {
    unsigned peers[kept];
#pragma unroll
    for (int k = 0; k < kept; ++k) peers[k] = __ballot_sync(every_lane, expert[k] >= 0);
#pragma unroll 1
    for (unsigned first = 0; first < bits; first += 4) {
#pragma unroll
      for (unsigned bit = 0; bit < 4; ++bit) {
#pragma unroll
        for (int k = 0; k < kept; ++k) {
          const bool set = (expert[k] >> (first + bit) & 1) != 0;
          const unsigned those = __ballot_sync(every_lane, set);
          peers[k] &= set ? those : ~those;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      rank[k] = __popc(peers[k] & ((1U << lane) - 1));
      equal[k] = __popc(peers[k]);
    }
  }
};

// ---- count -------------------------------------------------------------------------------------

__device__ __forceinline__ void count_one(const OrderCall& call, std::int32_t* counts,
                                          std::int32_t id) {
  const std::int32_t expert = local_expert(call, id);
  if (expert >= 0) atomicAdd(counts + expert, 1);
}

// The pairs of a segment outside the block's part: `before` of them from `begin` on, the others
// from `resume` on; `all` in total. `before`, `begin` and `resume` are multiples of 4.
struct Rest {
  static constexpr unsigned ahead = 4;  // vectors of 4 in flight, a thread
  std::uint32_t begin, before, resume, all;
  int4 ids[ahead];

  __device__ __forceinline__ std::uint32_t pair(std::uint32_t i) const {
    return i < before ? begin + i : resume + (i - before);
  }
  __device__ __forceinline__ void load(const OrderCall& call, std::uint32_t from) {
#pragma unroll
    for (unsigned a = 0; a < ahead; ++a) {
      const std::uint32_t i = from + a * 4 * blockDim.x;
      if (i + 4 <= all) ids[a] = __ldcg(reinterpret_cast<const int4*>(call.ids + pair(i)));
    }
  }
  __device__ __forceinline__ void count(const OrderCall& call, const Tables& tables,
                                        std::uint32_t from, std::uint32_t valid) const {
#pragma unroll
    for (unsigned a = 0; a < ahead; ++a) {
      const std::uint32_t i = from + a * 4 * blockDim.x;
      if (i + 4 > all) break;
      std::int32_t* const counts = i < before ? tables.first : tables.segment;
      const std::uint32_t at = pair(i);
      int4 id = ids[a];
      map_ids(call, id);
      if (at < valid) count_one(call, counts, id.x);
      if (at + 1 < valid) count_one(call, counts, id.y);
      if (at + 2 < valid) count_one(call, counts, id.z);
      if (at + 3 < valid) count_one(call, counts, id.w);
    }
  }
  // One at a time: from `from` on, which need not be aligned.
  __device__ __forceinline__ void count_singly(const OrderCall& call, const Tables& tables,
                                               std::uint32_t from, std::uint32_t valid) const {
#pragma unroll 1
    for (std::uint32_t i = from + threadIdx.x; i < all; i += blockDim.x) {
      const std::uint32_t at = pair(i);
      if (at >= valid) continue;
      int4 id{__ldcg(call.ids + at), 0, 0, 0};
      map_ids(call, id);
      count_one(call, i < before ? tables.first : tables.segment, id.x);
    }
  }
};

// Turns a column of counters into its exclusive prefix sums; returns its sum.
__device__ __forceinline__ std::int32_t prefix_rows(std::int32_t* counter, unsigned rows,
                                                    unsigned stride) {
  constexpr unsigned batch = 8;
  std::int32_t before = 0;
#pragma unroll 1
  for (unsigned r = 0; r < rows; r += batch, counter += batch * stride) {
    std::int32_t counted[batch];
#pragma unroll
    for (unsigned j = 0; j < batch; ++j) counted[j] = r + j < rows ? counter[j * stride] : 0;
#pragma unroll
    for (unsigned j = 0; j < batch; ++j) {
      if (r + j < rows) counter[j * stride] = before;
      before += counted[j];
    }
  }
  return before;
}

}  // namespace shunt::ordering
