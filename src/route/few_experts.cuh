// From a token's logits in bf16 to ids and weights, by some lanes, for the usual rule (a softmax of
// the selected and nothing else) and up to 32 experts: what is left where a token takes no longer
// than its launch. Exact for any logits; nothing is left to others.
#pragma once

#include "route/plain_rows.cuh"

namespace shunt::routing {

// Infinities and what is no number among the largest: exactly, one by one.
__device__ __noinline__ inline int first_by_turns(const void* row, Form form, int experts) {
  const LogitRow logits{row, form};
  int id = 0;
  float best = sanitised(logits(0));
#pragma unroll 1
  for (int e = 1; e < experts; ++e) {
    const float value = sanitised(logits(e));
    if (value > best) best = value, id = e;
  }
  return id;
}

// The best of 2 `lanes` words of two bf16 each, of which lane q has `words`, which are 2 q and
// 2 q + 1. `row`: all of them again.
template <int lanes>
__device__ __forceinline__ int first_of_lanes(uint2 words, const void* row, int q) {
  const std::uint32_t low = finite_pair<true>(words.x), high = finite_pair<true>(words.y);
  const std::uint32_t base = 0xffff ^ static_cast<std::uint32_t>(4 * q);
  float key = fmaxf(fmaxf(packed_key<false>(low, base, 0), packed_key<true>(low, base, 1)),
                    fmaxf(packed_key<false>(high, base, 2), packed_key<true>(high, base, 3)));
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    key = fmaxf(key, __shfl_xor_sync(every_lane, key, step));
  }
  int id = id_of_packed(key);
  if (fabsf(key) >= float_of(largest_bf16 << 16)) [[unlikely]] {
    id = first_by_turns(row, Form::bf16, 4 * lanes);
  }
  return id;
}

// Orders bf16 in the upper half, so that NaN and -inf are least, +inf is greatest and -0 is 0; the
// lower id, below 32, is the greater key. Never 0.
__device__ __forceinline__ std::uint32_t ordered_bf16(std::uint32_t bits, int id) {
  if ((bits & 0x7fff) > 0x7f80) bits = 0xff80;
  if (bits == 0x8000) bits = 0;
  const std::uint32_t high = bits << 16;
  const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<std::int32_t>(high) >> 31);
  return ((high ^ (sign | 0x80000000U)) & 0xffff0000U) | (0xffffU - static_cast<unsigned>(id));
}
// What a lane has of a token: slot -1 if its expert is not selected.
struct Selected {
  int slot;
  float weight;
};
// `bits`: the logit of expert `lane`. `experts`: at least k; 32: known to be as many.
template <int k>
__device__ __forceinline__ Selected best_of_warp(std::uint32_t bits, int experts, int lane) {
  const float value = sanitised(float_of(static_cast<std::int32_t>(bits << 16)));
  std::uint32_t key = ordered_bf16(bits, lane);
  if (lane >= experts) key = 0;
  int slot = -1, lanes[k];
#pragma unroll
  for (int s = 0; s < k; ++s) {
    const std::uint32_t best = __reduce_max_sync(every_lane, key);
    lanes[s] = static_cast<int>(~best & 31);
    if (key == best) slot = s, key = 0;
  }
  const float first = __shfl_sync(every_lane, value, lanes[0]);
  float w[1] = {exp_of_mostly_small(slot >= 0 ? value - first : 0)};
  float sum = 0;  // from slot 0 on
#pragma unroll
  for (int s = 0; s < k; ++s) sum += __shfl_sync(every_lane, w[0], lanes[s]);
  divide_by(w, sum);
  return {slot, w[0]};
}

}  // namespace shunt::routing
