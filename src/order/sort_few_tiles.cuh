// The stable sort of few pairs into padded tiles: counted once, placed by comparing, little code.
//
//   sort_few_tiles(call, plan, block, shared)
// Every block makes the keys of all pairs, expert * 2^pair_bits + pair, in shared memory, and
// counts each expert's with atomics on integers (barrier before: the counts are zero; after: keys
// and counts are there). One scan over the experts, a thread each, with tiles in the upper and
// pairs in the lower 16 bits of a sum, says where each expert starts in either form (barriers: sums
// of warps; starts). A pair's row is the number of keys below its own; plan.compare_lanes lanes
// count them together. Pairs, and experts to be padded, are shared out over plan.parts blocks.
//
// Shared memory: keys, two tables of plan.stride ints, 32 sums. Time predicted on an H200, in a
// graph: 2.6 us for 8 pairs, 3 for 512; what it saves against sort.cuh are instructions that must
// first be fetched.
#pragma once

#include "order/sort.cuh"

namespace shunt::ordering {

__device__ __forceinline__ void sort_few_tiles(const OrderCall& call, const SortPlan& plan,
                                               unsigned block, std::int32_t* shared) {
  constexpr std::uint32_t skipped = 0xffffffffU;  // above every key
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const std::uint32_t pairs =
      static_cast<std::uint32_t>(call.tokens) * static_cast<std::uint32_t>(call.slots);
  const std::uint32_t filled = (pairs + 3) / 4 * 4;
  const auto locals = static_cast<unsigned>(call.locals);
  auto* const keys = reinterpret_cast<std::uint32_t*>(shared);
  std::int32_t* const firsts = shared + plan.few_keys;  // counts, then the first compact row
  std::int32_t* const starts = firsts + plan.stride;    // the first padded row
  std::int32_t* const sums = starts + plan.stride;

  // A thread's first ids and weight are on their way while counts are cleared.
  const unsigned lanes = plan.compare_lanes, sub = thread % lanes;
  const unsigned at_once = blockDim.x / lanes;
  std::uint32_t q = block * at_once + thread / lanes;
  float weight = 0;
  if (plan.weighted && sub == 0 && q < pairs) weight = __ldcg(call.weights + q);
  std::int32_t id = thread < pairs ? __ldcg(call.ids + thread) : -1;
  const std::uint32_t valid = valid_pairs(call);
  for (unsigned e = thread; e <= locals; e += blockDim.x) firsts[e] = 0;
  __syncthreads();
#pragma unroll 1
  for (std::uint32_t i = thread; i < filled; i += blockDim.x) {
    int4 mapped{id, 0, 0, 0};
    map_ids(call, mapped);
    const std::int32_t expert = i < valid ? local_expert(call, mapped.x) : -1;
    keys[i] = expert >= 0 ? static_cast<std::uint32_t>(expert) << pair_bits | i : skipped;
    if (expert >= 0) atomicAdd(firsts + expert, 1);
    const std::uint32_t next = i + blockDim.x;
    id = next < pairs ? __ldcg(call.ids + next) : -1;
  }
  __syncthreads();

  const bool exists = thread < locals;
  const std::int32_t count = exists ? firsts[thread] : 0;
  const std::int32_t tiles = count > 0 ? (count - 1) / call.tile + 1
                                       : static_cast<std::int32_t>(call.tile_for_empty_expert);
  const std::int32_t packed = exists ? tiles << 16 | count : 0;
  std::int32_t before = inclusive_scan(packed, lane);
  if (lane == 31) sums[warp] = before;
  before -= packed;
  __syncthreads();
  const std::int32_t warps_until = inclusive_scan(lane < blockDim.x / 32 ? sums[lane] : 0, lane);
  if (warp > 0) before += __shfl_sync(every_lane, warps_until, static_cast<int>(warp) - 1);
  const std::int32_t all = __shfl_sync(every_lane, warps_until, 31);
  const std::int32_t all_pairs = all & 0xffff, all_tiles = all >> 16;
  const std::int32_t first = before & 0xffff, first_tile = before >> 16;
  if (exists) {
    firsts[thread] = first;
    starts[thread] = first_tile * call.tile;
  }
  if (thread == 0) {
    firsts[locals] = all_pairs;
    starts[locals] = all_tiles * call.tile;
  }
  if (block == 0) {
    if (exists && call.offsets != nullptr) call.offsets[thread] = first;
    if (thread == 0) {
      if (call.offsets != nullptr) call.offsets[locals] = all_pairs;
      if (call.num_tokens_post_padded != nullptr) {
        *call.num_tokens_post_padded = all_tiles * call.tile;
      }
      if (call.num_sorted_tiles != nullptr) *call.num_sorted_tiles = all_tiles;
    }
  }
  __syncthreads();

#pragma unroll 1
  for (std::uint32_t begin = block * at_once; begin < pairs;
       begin += plan.parts * at_once, q += plan.parts * at_once) {
    const std::uint32_t bound = q < pairs ? keys[q] : 0;
    if (begin != block * at_once && plan.weighted && sub == 0 && q < pairs) {
      weight = __ldcg(call.weights + q);
    }
    std::int32_t below = 0;
#pragma unroll 2
    for (std::uint32_t i = 4 * sub; i < pairs; i += 4 * lanes) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
      below += four.x < bound;
      below += four.y < bound;
      below += four.z < bound;
      below += four.w < bound;
    }
#pragma unroll 1
    for (unsigned step = lanes / 2; step > 0; step /= 2) {
      below += __shfl_xor_sync(every_lane, below, step);
    }
    if (sub != 0 || q >= pairs) continue;
    std::int32_t row = -1, padded_row = -1;
    if (bound != skipped) {
      row = below;
      padded_row = starts[bound >> pair_bits] + (below - firsts[bound >> pair_bits]);
      if (call.permutation != nullptr) call.permutation[row] = static_cast<std::int32_t>(q);
      if (call.row_weights != nullptr) call.row_weights[row] = weight;
      if (call.sorted_token_ids != nullptr) {
        call.sorted_token_ids[padded_row] =
            static_cast<std::int32_t>(q / static_cast<std::uint32_t>(call.slots));
      }
      if (call.sorted_weights != nullptr) call.sorted_weights[padded_row] = weight;
    }
    if (call.inverse != nullptr) call.inverse[q] = row;
    if (call.padded_inverse != nullptr) call.padded_inverse[q] = padded_row;
  }
  fill_padding(
      call, starts, [&](unsigned e) { return firsts[e + 1] - firsts[e]; }, block, plan.parts);
  if (call.zeroed_bytes > 0 && plan.zero_blocks == 0) {
    zero_share(call.zeroed, call.zeroed_bytes, std::size_t{block} * blockDim.x + thread,
               std::size_t{plan.parts} * blockDim.x);
  }
}

}  // namespace shunt::ordering
