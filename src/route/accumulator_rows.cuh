// From the accumulators of mma.sync (m16n8k16, columns by tokens) to ids and weights of eight
// tokens of up to 16 experts, by one warp that has them, where the rule is is_softmax_of_top().
//
// Lane 4 g + q holds columns g and g + 8 of tokens 2 q and 2 q + 1. A key is the logit and behind
// it the id, 64 bits, so that there are no ties and nothing to select anew, NaN and infinities
// included. Lanes merge their lists over g; then all eight of a token have its best, and lane g
// stores slot g.
#pragma once

#include "route/plain_rows.cuh"

namespace shunt::routing {

template <int P>
struct AccumulatorShape {
  static constexpr int lanes = 32, best = P;  // lists are merged over the lanes 4, 8, 16 apart
};

// `first`: the token of column 0 of the accumulators; P: 4 or 8, at least top_k.
template <int P>
__device__ __forceinline__ void route_accumulators(const TokenRoute& r, const float (&sums)[4],
                                                   std::int64_t first, std::int64_t valid,
                                                   int lane) {
  using S = AccumulatorShape<P>;
  const int g = lane >> 2, q = lane & 3, k = r.rule.top_k;
  const auto key = [&](int at, float logit) {
    return at < r.rule.experts ? key_of(sanitised(logit), at) : no_key;
  };
  SortedKeys<std::int64_t, P> best[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const std::int64_t a = key(g, sums[j]), b = key(g + 8, sums[2 + j]);
    const std::int64_t list[2] = {larger_key(a, b), smaller_key(a, b)};
    best[j] = merge_keys<S, 4>(list, no_key);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const auto logit = [](std::int64_t of) {
      return float_of_ordered(static_cast<std::int32_t>(of >> 32));
    };
    const std::int64_t own = key_at(best[j], g);
    float w = exp_of_negative(logit(own) - logit(best[j].of[0]));
    float sum = 0;
#pragma unroll
    for (int s = 0; s < P; ++s) {
      const float of_slot = __shfl_sync(every_lane, w, 4 * s + q);
      if (s < k) sum += of_slot;
    }
    w = w / sum;
    const std::int64_t t = first + 2 * q + j;
    if (g >= k || t >= r.tokens) continue;
    const bool there = t < valid;
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + g] = there ? id_of(own) : -1;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + g] = there ? w : 0;
  }
}

}  // namespace shunt::routing
