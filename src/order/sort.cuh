// The stable counting sort of order(), by one cluster of blocks; the device code.
//
//   sort_pairs<clustered, kept, padded>(call, plan, part, shared)
// All threads of the cluster call it. Cluster p of plan.parts places part p of every segment
// (sort_plan.hpp); clusters share nothing, so they may run in any order, together or not.
//
//   count    block b counts segment b: its own part by warp, a row of counters for each, the rest
//            into two tables, before and after its part. Counters are integers: their atomics in
//            shared memory give the same counts in any order.
//   exchange counts of a segment are read by every block of the cluster from distributed shared
//            memory, after one cluster barrier; a second one, waited for at the end, keeps them
//            alive.
//   scan     every block scans the experts, a thread each, redundantly.
//   place    a warp takes its pairs 32 at a time; ballots over the bits of the expert give a pair's
//            rank among the equal ones of the 32, and the first of them moves the warp's counter
//            on. The first `kept` groups of 32 stay in registers from the count.
//   stage    where a block has several pairs of an expert, they are gathered in shared memory and
//            stored in runs: a scattered store costs 2.5 cycles a sector and multiprocessor.
//   fill     padding rows, unused tiles, the buffer to be zeroed: over all blocks.
//
// Shared memory, tables of plan.stride ints: counts of the segment; pairs before the block's part,
// then what is added to a pair's place among the block's to get its row; rows of counters, one a
// warp; for the padded form the first padded row of each expert and the block's offset within the
// expert; for the stage each expert's first place in it.
//
// Bytes: ids once a cluster (from L2 after the first), weights once, outputs once. Counting takes
// 7 cycles for 32 ids and multiprocessor (atomics in shared memory), placing some 25 a warp.
#pragma once

#include "order/sort_count.cuh"

namespace shunt::ordering {

// ---- scan --------------------------------------------------------------------------------------

// A running sum over the experts, blockDim.x at a time.
struct Scan {
  std::int32_t carry = 0, scanned = 0;  // of the experts before these; of the warp's, inclusive

  __device__ __forceinline__ void within_warp(std::int32_t value, std::int32_t* sums, unsigned warp,
                                              unsigned lane) {
    scanned = inclusive_scan(value, lane);
    if (lane == 31) sums[warp] = scanned;
  }
  // After a barrier: the sum of all before this thread's `value`. `warps` have written their sums.
  __device__ __forceinline__ std::int32_t before(std::int32_t value, const std::int32_t* sums,
                                                 unsigned warp, unsigned warps) {
    std::int32_t sum = carry + scanned - value;
#pragma unroll 1
    for (unsigned w = 0; w < warps; w += 4) {
      const int4 four = *reinterpret_cast<const int4*>(sums + w);
      const std::int32_t of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        if (w + j < warp) sum += of[j];
        if (w + j < warps) carry += of[j];
      }
    }
    return sum;
  }
};

// Counts to first rows, over all experts; stores the outputs that have one entry an expert when
// `stores`. Ends with the tables written but no barrier. Returns the pairs that the block places
// (0 when not staged).
template <bool clustered, bool padded_form>
__device__ __forceinline__ std::int32_t scan_experts(const OrderCall& call, const SortPlan& plan,
                                                     const Tables& tables, unsigned rank,
                                                     bool stores) {
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto locals = static_cast<unsigned>(call.locals);
  Scan rows, own_rows, padded_rows;
  unsigned buffer = 0;
#pragma unroll 1
  for (unsigned start = 0; start < locals; start += blockDim.x, buffer ^= 1) {
    const unsigned expert = start + thread;
    const bool exists = expert < locals;
    // Pairs of this expert: of all blocks; before this block's part; in it.
    std::int32_t all = 0, base = 0, own = 0;
    if (exists) {
      base = tables.first[expert];
      if constexpr (clustered) {
        const auto address =
            static_cast<std::uint32_t>(__cvta_generic_to_shared(tables.segment + expert));
#pragma unroll 1
        for (unsigned first = 0; first < plan.cluster; first += 8) {
          std::int32_t counted[8];
#pragma unroll
          for (unsigned b = 0; b < 8; ++b) {
            counted[b] = first + b < plan.cluster ? load_remote(address, first + b) : 0;
          }
#pragma unroll
          for (unsigned b = 0; b < 8; ++b) {
            all += counted[b];
            if (first + b < rank) base += counted[b];
          }
        }
        if (plan.staged) own = tables.local[expert];
      } else {
        own = prefix_rows(tables.counters + expert, plan.rows, plan.stride);
        all = base + own + tables.segment[expert];
      }
    }
    std::int32_t tile_rows = 0;
    if (padded_form && exists) {
      const std::int32_t tiles = all > 0 ? (all - 1) / call.tile + 1
                                         : static_cast<std::int32_t>(call.tile_for_empty_expert);
      tile_rows = tiles * call.tile;
    }
    std::int32_t* const sums = tables.sums + 96 * buffer;
    rows.within_warp(all, sums, warp, lane);
    if (plan.staged) own_rows.within_warp(own, sums + 32, warp, lane);
    if (padded_form) padded_rows.within_warp(tile_rows, sums + 64, warp, lane);
    __syncthreads();
    const unsigned warps = min(blockDim.x, locals - start + 31) / 32;
    const std::int32_t first = rows.before(all, sums, warp, warps);
    const std::int32_t local = plan.staged ? own_rows.before(own, sums + 32, warp, warps) : 0;
    if (exists) {
      tables.first[expert] = first + base - local;
      if (plan.staged) tables.local[expert] = local;
      if (stores && call.offsets != nullptr) call.offsets[expert] = first;
    }
    if (padded_form) {
      const std::int32_t padded = padded_rows.before(tile_rows, sums + 64, warp, warps);
      if (exists) {
        tables.padded[expert] = padded;
        tables.base[expert] = base - local;
      }
    }
  }
  if (thread == 0) {
    if (padded_form) {
      tables.first[locals] = rows.carry;
      tables.padded[locals] = padded_rows.carry;
      tables.base[locals] = 0;
    }
    if (stores) {
      if (call.offsets != nullptr) call.offsets[locals] = rows.carry;
      if (call.num_tokens_post_padded != nullptr) *call.num_tokens_post_padded = padded_rows.carry;
      if (call.num_sorted_tiles != nullptr) *call.num_sorted_tiles = padded_rows.carry / call.tile;
    }
  }
  return own_rows.carry;
}

// ---- place -------------------------------------------------------------------------------------

// What a row holds. `at`: of the pair among the block's, or where that is staged, in the stage.
template <bool padded>
__device__ __forceinline__ void store_row(const OrderCall& call, const Tables& tables,
                                          std::int32_t expert, std::int32_t at, float weight,
                                          std::uint32_t pair) {
  const std::int32_t row = tables.first[expert] + at;
  if (call.permutation != nullptr) call.permutation[row] = static_cast<std::int32_t>(pair);
  if (call.row_weights != nullptr) call.row_weights[row] = weight;
  if (!padded) return;
  const std::int32_t padded_row = tables.padded[expert] + tables.base[expert] + at;
  if (call.sorted_token_ids != nullptr) {
    call.sorted_token_ids[padded_row] =
        static_cast<std::int32_t>(pair / static_cast<std::uint32_t>(call.slots));
  }
  if (call.sorted_weights != nullptr) call.sorted_weights[padded_row] = weight;
}

// Places the group whose first pair is `offset` pairs into the block's part, which begins at
// `begin`.
template <int kept, bool padded>
__device__ __forceinline__ void place_group(const OrderCall& call, const SortPlan& plan,
                                            const Tables& tables, std::int32_t* counters,
                                            const Group<kept>& group, std::uint32_t begin,
                                            std::uint32_t offset, int groups, std::uint32_t pairs,
                                            unsigned lane) {
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (k >= groups) break;
    const std::int32_t expert = group.expert[k];
    const std::uint32_t in_part = offset + 32 * k + lane;
    const std::uint32_t pair = begin + in_part;
    std::int32_t at = 0;
    if (expert >= 0) at = counters[expert] + group.rank[k];
    if (kept > 1) {
      __syncwarp();
      if (expert >= 0 && group.rank[k] == 0) counters[expert] = at + group.equal[k];
      __syncwarp();
    }
    std::int32_t row = -1, padded_row = -1;
    if (expert >= 0) {
      if (plan.staged) {
        at += tables.local[expert];
        tables.stage[at] = in_part | static_cast<std::uint32_t>(expert) << 16;
        if (plan.weighted) tables.stage_weights[at] = group.weight[k];
      } else {
        store_row<padded>(call, tables, expert, at, group.weight[k], pair);
      }
      row = tables.first[expert] + at;
      if (padded) padded_row = tables.padded[expert] + tables.base[expert] + at;
    }
    if (pair >= pairs) continue;
    if (call.inverse != nullptr) call.inverse[pair] = row;
    if (call.padded_inverse != nullptr) call.padded_inverse[pair] = padded_row;
  }
}

// The `count` staged pairs, in the order of their rows: runs of an expert are consecutive.
template <bool padded>
__device__ __forceinline__ void store_stage(const OrderCall& call, const SortPlan& plan,
                                            const Tables& tables, std::uint32_t begin,
                                            std::int32_t count) {
  const auto step = static_cast<std::int32_t>(blockDim.x);
#pragma unroll 1
  for (auto at = static_cast<std::int32_t>(threadIdx.x); at < count; at += step) {
    const std::uint32_t entry = tables.stage[at];
    store_row<padded>(call, tables, static_cast<std::int32_t>(entry >> 16), at,
                      plan.weighted ? tables.stage_weights[at] : 0.0F, begin + (entry & 0xffffU));
  }
}

// ---- fill --------------------------------------------------------------------------------------

// Padding rows and tiles, block `block` of `blocks`. padded: where each expert starts, and the last
// ends; count_of(e): its pairs.
template <class CountOf>
__device__ __forceinline__ void fill_padding(const OrderCall& call, const std::int32_t* padded,
                                             const CountOf& count_of, unsigned block,
                                             unsigned blocks) {
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const auto locals = static_cast<unsigned>(call.locals);
#pragma unroll 1
  for (unsigned e = block + blocks * (threadIdx.x / 32); e < locals; e += blocks * warps) {
    const std::int32_t begin = padded[e], end = padded[e + 1];
    const std::int32_t count = count_of(e);
#pragma unroll 1
    // All below 2^31, which a step may pass.
    for (auto r = static_cast<std::uint32_t>(begin + count) + lane;
         r < static_cast<std::uint32_t>(end); r += 32) {
      if (call.sorted_token_ids != nullptr) call.sorted_token_ids[r] = call.sentinel;
      if (call.sorted_weights != nullptr) call.sorted_weights[r] = 0;
    }
    if (call.sorted_expert_ids == nullptr) continue;
    const std::int32_t tiles = end / call.tile;
#pragma unroll 1
    for (std::int32_t i = begin / call.tile + static_cast<std::int32_t>(lane); i < tiles; i += 32) {
      call.sorted_expert_ids[i] = static_cast<std::int32_t>(e);
    }
  }
  // Below 2^31, and so is the capacity.
  const auto used = static_cast<std::uint32_t>(padded[call.locals]);
  const auto capacity = static_cast<std::uint32_t>(call.capacity);
  const auto tile = static_cast<std::uint32_t>(call.tile);
  const std::uint32_t worker = block * blockDim.x + threadIdx.x;
  const std::uint32_t workers = blocks * blockDim.x;
#pragma unroll 1
  for (std::uint32_t r = used + worker; r < capacity; r += workers) {
    if (call.sorted_token_ids != nullptr) call.sorted_token_ids[r] = call.sentinel;
    if (call.sorted_weights != nullptr) call.sorted_weights[r] = 0;
  }
  if (call.sorted_expert_ids == nullptr) return;
  const std::uint32_t tiles = capacity / tile;
#pragma unroll 1
  for (std::uint32_t i = used / tile + worker; i < tiles; i += workers) {
    call.sorted_expert_ids[i] = -1;
  }
}

// ---- all of it ---------------------------------------------------------------------------------

// `clustered`: plan.cluster > 1; `padded`: plan.padded. With kept == 1 plan.chunks must be 1.
template <bool clustered, int kept, bool padded>
__device__ __forceinline__ void sort_pairs(const OrderCall& call, const SortPlan& plan,
                                           unsigned part, std::int32_t* shared) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned rank = clustered ? cluster_rank() : 0;
  const auto locals = static_cast<unsigned>(call.locals);
  const Tables tables(plan, shared);
  const std::uint32_t pairs =
      static_cast<std::uint32_t>(call.tokens) * static_cast<std::uint32_t>(call.slots);

  // The segment, the block's part of it, the warp's of that.
  const std::uint32_t segment_begin = rank * plan.segment;
  const std::uint32_t begin = segment_begin + part * plan.share;
  const std::uint32_t end = begin + plan.share;
  const bool places = warp < plan.rows;
  const std::uint32_t mine = begin + warp * plan.chunks * 32;
  const std::uint32_t mine_end = min(mine + plan.chunks * 32, pairs);
  std::int32_t* const counters = tables.counters + warp * plan.stride;

  // Everything that comes from far away is asked for at once.
  Group<kept> group;
  if (places) group.load(call, plan.weighted, mine, mine_end, lane);
  const std::uint32_t segment_end = min(segment_begin + plan.segment, pairs);
  Rest rest;
  rest.begin = segment_begin;
  rest.before = max(min(begin, segment_end), segment_begin) - segment_begin;
  rest.resume = end;
  rest.all = rest.before + (max(end, segment_end) - end);
  std::uint32_t i = 4 * threadIdx.x;
  if (plan.wide_ids) rest.load(call, i);
  const std::uint32_t valid = valid_pairs(call);
  clear_tables(plan, shared);
  __syncthreads();  // the tables are zero
  if (plan.wide_ids) {
#pragma unroll 1
    while (i + 4 <= rest.all) {
      rest.count(call, tables, i, valid);
      i += Rest::ahead * 4 * blockDim.x;
      if (i + 4 <= rest.all) rest.load(call, i);
    }
  }
  rest.count_singly(call, tables, plan.wide_ids ? rest.all / 4 * 4 : 0, valid);
  if (places) {
#pragma unroll 1
    for (unsigned c = 0;; c += kept) {
      if (c > 0) group.load(call, false, mine + 32 * c, mine_end, lane);
      group.local(call, mine + 32 * c, min(mine_end, valid), lane);
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        if (group.expert[k] >= 0) atomicAdd(counters + group.expert[k], 1);
      }
      if (c + kept >= plan.chunks) break;
    }
    if (plan.chunks <= kept) group.find_ranks(plan.bits, lane);
  }
  __syncthreads();  // counted

  if constexpr (clustered) {
#pragma unroll 1
    for (unsigned e = threadIdx.x; e < locals; e += blockDim.x) {
      const std::int32_t own = prefix_rows(tables.counters + e, plan.rows, plan.stride);
      if (plan.staged) tables.local[e] = own;
      // The segment's table has what comes after the part.
      tables.segment[e] += own + tables.first[e];
    }
    cluster_arrive();
    cluster_wait();  // every block has counted; its blocks run, or they could not have arrived
  }
  const std::int32_t staged =
      scan_experts<clustered, padded>(call, plan, tables, rank, part == 0 && rank == 0);
  if constexpr (clustered) cluster_arrive();  // this block has read the others' counts
  __syncthreads();                            // the tables are complete

  if (places) {
#pragma unroll 1
    for (unsigned c = 0; c < plan.chunks; c += kept) {
      if (plan.chunks > kept) {
        group.load(call, plan.weighted, mine + 32 * c, mine_end, lane);
        group.local(call, mine + 32 * c, min(mine_end, valid), lane);
        group.find_ranks(plan.bits, lane);
      }
      place_group<kept, padded>(call, plan, tables, counters, group, begin,
                                (warp * plan.chunks + c) * 32, static_cast<int>(plan.chunks - c),
                                pairs, lane);
    }
  }
  if (plan.staged) {
    __syncthreads();  // the stage is complete
    store_stage<padded>(call, plan, tables, begin, staged);
  }
  const unsigned block = part * plan.cluster + rank, blocks = plan.parts * plan.cluster;
  if (padded) {
    const auto count_of = [&](unsigned e) {
      return (tables.first[e + 1] - tables.base[e + 1]) - (tables.first[e] - tables.base[e]);
    };
    fill_padding(call, tables.padded, count_of, block, blocks);
  }
  if (call.zeroed_bytes > 0 && plan.zero_blocks == 0) {
    zero_share(call.zeroed, call.zeroed_bytes, std::size_t{block} * blockDim.x + threadIdx.x,
               std::size_t{blocks} * blockDim.x);
  }
  if constexpr (clustered) cluster_wait();  // none reads this block's counts any more
}

}  // namespace shunt::ordering
