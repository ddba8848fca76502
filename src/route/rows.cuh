// From the logits of one token to its ids and weights, by one warp. What every routing kernel ends
// in, whether its logits come from memory, from shared memory or from an accumulator.
//
//   route_row<N, grouped>(route, source, own, t, lane)
// All 32 lanes call it together. `source(c)` is the raw logit of column c of this token (before
// bias and cap), any c in [0, C), any lane, cheap to ask again. `own` holds the raw logits of the
// lane's N experts: lane + 32 i, or with `grouped` lane * N + i; -inf past E. Outputs go where
// `route` says. Nothing is synchronised but the warp.
//
// Selection has two ways, which give the same ids:
//   quick  each lane sorts its experts' keys: 32 bits, the value with its lowest bits replaced by
//          the index within the lane; k + 1 rounds of one redux.max pick the best of 32 heads. A
//          sigmoid that is only compared is computed with the fast instructions. Where two
//          neighbours of the result, or two groups, are closer than what this leaves out, it gives
//          up, and the values are computed exactly and chosen from in as many rounds of two redux:
//          fewer than one row of a hundred on random logits.
//   exact  k rounds over all experts with 64-bit keys (value, id), each for the best key below the
//          last. No state, any E, k and groups.
// Weights are then computed from the logits of the chosen, with the arithmetic of policy.hpp in its
// order of sums: the CPU engine's bits.
//
// Time: quick, E = 128, k = 8: about 190 instructions a warp and row; 8 issue cycles a redux.
#pragma once

#include "route/select_rows.cuh"
#include "route/weigh_rows.cuh"

namespace shunt::routing {

// ---- a row -------------------------------------------------------------------------------------

// What follows once the ids are chosen, or looked up.
template <class Source>
__device__ __forceinline__ void finish_row(const DeviceRoute& r, const Source& source,
                                           const Softmax& softmax, const Slots<std::int32_t>& ids,
                                           std::int64_t t, int lane) {
  const Rule& rule = r.rule;
  Slots<float> w = weigh(r, source, softmax, ids, lane);
  float sum = 0;
  const bool joint = rule.shared_count > 0 && rule.shared == Shared::joint;
  if (rule.renormalize || (rule.shared_count > 0 && rule.shared == Shared::sum_over_scale)) {
    sum = sum_of_slots(w, rule.top_k);
    if (joint) {
      for (int i = 0; i < rule.shared_count; ++i) sum += shared_score(r, source, i);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = lane + 32 * half;
    if (s >= rule.top_k) continue;
    const std::int32_t id = ids.of[half];
    w.of[half] = id < 0 ? 0.0F : finite_weight(final_weight(r, w.of[half], sum, id));
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + s] = id;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + s] = w.of[half];
    if (r.replay.data != nullptr) {
      r.replay.data[t * r.replay.stride + s] = static_cast<std::int16_t>(id);
    }
  }
  if (r.dense.data != nullptr) store_dense(r, t, ids, w, lane);
  if (rule.shared_count > 0) store_shared(r, source, t, sum, lane);
  if (r.logits_out.data != nullptr) {
    for (int c = lane; c < rule.columns; c += 32) {
      r.logits_out.data[t * r.logits_out.stride + c] = finished(r, source(c), c);
    }
  }
}

template <int N, bool grouped, class Source>
__device__ __forceinline__ void route_row(const DeviceRoute& r, const Source& source,
                                          const float (&own)[N], std::int64_t t, int lane) {
  const Rule& rule = r.rule;
  Softmax softmax;
  Slots<std::int32_t> ids{{-1, -1}};
  bool chosen = false;
  if (r.quick) {
    float l[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int e = expert_of<N, grouped>(lane, i);
      l[i] = e < rule.experts ? finished(r, own[i], e) : minus_infinity;
    }
    if (rule.weigh == Weigh::softmax_of_all) {
      if constexpr (grouped) {
        softmax = softmax_of(r, source, lane);
      } else {
        float best = l[0];
#pragma unroll
        for (int i = 1; i < N; ++i) best = larger(best, l[i]);
        softmax.best = warp_max(best);
        softmax.sum = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) softmax.sum += exp_of_negative(l[i] - softmax.best);
        softmax.sum = warp_sum(softmax.sum);
      }
    }
    if (!r.hashed) {
      chosen = true;
      // Whose group has given its limit, the quick way does not know.
      if (rule.group_limit > 0 || !select_quick<N, grouped>(r, l, softmax, lane, ids)) {
        select_held<N, grouped>(r, l, softmax, lane, ids);
      }
    }
  } else if (rule.weigh == Weigh::softmax_of_all) {
    softmax = softmax_of(r, source, lane);
  }
  if (r.hashed) {
    ids = look_up(r, t, lane);
  } else if (!chosen) {
    ids = select_exact(r, source, lane);
  }
  finish_row(r, source, softmax, ids, t, lane);
}

}  // namespace shunt::routing
