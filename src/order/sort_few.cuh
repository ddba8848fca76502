// The stable sort of few pairs, by comparing each with all: no counters, no scan, one barrier.
//
//   sort_few(call, plan, block, shared)
// Every block makes the keys of all pairs, expert * 2^pair_bits + pair, in shared memory. A pair's
// row is the number of keys below its own, and the first row of expert e the number of keys below
// e * 2^pair_bits: so both are one question, which plan.compare_lanes lanes answer together, each
// for a part of the keys. Questions are shared out over plan.parts blocks.
//
// Time: the barrier, then 3 instructions a key and question over all lanes.
#pragma once

#include "order/sort.cuh"

namespace shunt::ordering {

__device__ __forceinline__ void sort_few(const OrderCall& call, const SortPlan& plan,
                                         unsigned block, std::uint32_t* keys) {
  constexpr std::uint32_t skipped = 0xffffffffU;  // above every key
  const std::uint32_t pairs =
      static_cast<std::uint32_t>(call.tokens) * static_cast<std::uint32_t>(call.slots);
  const std::uint32_t questions = pairs + static_cast<std::uint32_t>(call.locals) + 1;
  const unsigned lanes = plan.compare_lanes;
  const unsigned mine = threadIdx.x / lanes, sub = threadIdx.x % lanes;
  const unsigned at_once = blockDim.x / lanes;

  std::uint32_t q = block * at_once + mine;
  float weight = 0;
  if (plan.weighted && sub == 0 && q < pairs) weight = __ldcg(call.weights + q);
  // A thread's first ids are on their way together.
  constexpr int ahead = 4;
  std::int32_t ids[ahead];
#pragma unroll
  for (int a = 0; a < ahead; ++a) {
    const std::uint32_t i = threadIdx.x + a * blockDim.x;
    ids[a] = i < pairs ? __ldcg(call.ids + i) : -1;
  }
  const std::uint32_t valid = valid_pairs(call);
  const std::uint32_t padded = (pairs + 3) / 4 * 4;
  const auto make_key = [&](std::uint32_t i, std::int32_t id) {
    int4 mapped{id, 0, 0, 0};
    map_ids(call, mapped);
    const std::int32_t expert = i < valid ? local_expert(call, mapped.x) : -1;
    keys[i] = expert >= 0 ? static_cast<std::uint32_t>(expert) << pair_bits | i : skipped;
  };
#pragma unroll
  for (int a = 0; a < ahead; ++a) {
    const std::uint32_t i = threadIdx.x + a * blockDim.x;
    if (i < padded) make_key(i, ids[a]);
  }
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x + ahead * blockDim.x; i < padded; i += blockDim.x) {
    make_key(i, i < pairs ? __ldcg(call.ids + i) : -1);
  }
  __syncthreads();

#pragma unroll 1
  for (std::uint32_t first = block * at_once; first < questions;
       first += plan.parts * at_once, q += plan.parts * at_once) {
    std::uint32_t bound = 0;
    if (q < pairs) {
      bound = keys[q];
      if (first != block * at_once && plan.weighted && sub == 0) weight = __ldcg(call.weights + q);
    } else {
      bound = (q - pairs) << pair_bits;
    }
    std::int32_t below = 0;
#pragma unroll 4
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
    if (sub != 0 || q >= questions) continue;
    if (q >= pairs) {
      if (call.offsets != nullptr) call.offsets[q - pairs] = below;
      continue;
    }
    const bool kept = bound != skipped;
    if (kept && call.permutation != nullptr) call.permutation[below] = static_cast<std::int32_t>(q);
    if (kept && call.row_weights != nullptr) call.row_weights[below] = weight;
    if (call.inverse != nullptr) call.inverse[q] = kept ? below : -1;
  }
  if (call.zeroed_bytes > 0 && plan.zero_blocks == 0) {
    zero_share(call.zeroed, call.zeroed_bytes, std::size_t{block} * blockDim.x + threadIdx.x,
               std::size_t{plan.parts} * blockDim.x);
  }
}

}  // namespace shunt::ordering
