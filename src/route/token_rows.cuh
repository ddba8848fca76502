// From the logits of one token to its ids and weights, by a whole block: a thread for each expert.
// What few tokens take least time by: no list is sorted, and no chain is longer than it must be.
//
//   1. Where groups are dropped, a warp is a group: its two best rank it.  barrier of the block:
//   all
//                                                                          are ranked
//      A thread ranks its value, computed exactly, among the 32 of its warp: it counts who comes
//      before it. The P first of each warp, of those groups that stay, are its list.
//                                             barrier of the warp, then of the block: lists are
//                                             there
//   2. A thread for each entry of a list counts, over all lists, who comes before that.
//                                             barrier of the block, or of the warp if one is enough
//   3. Lane s of warp 0 weighs slot s.
// Everything is exact, so nothing is done twice. 256 experts, predicted: 900 cycles from the
// logits on, of which two exchanges of 32 values through shared memory and counting take half;
// measured: 0.7 us more than a launch that reads.
#pragma once

#include "route/token_route.cuh"
#include "route/weights.cuh"

namespace shunt::routing {

// For at most 32 * warps experts and best >= k.
template <int warps_, int best_, Ranked ranked_>
struct TokenShape {
  static constexpr int warps = warps_, best = best_;
  static constexpr Ranked ranked = ranked_;
  static constexpr bool in_groups = ranked == Ranked::score_in_groups;
  static constexpr int counting = warps * best < 32 ? 1 : warps * best / 32;  // warps of step 2
  static_assert(best % 4 == 0 && (!in_groups || (warps == 8 && best == 8)));
};

template <class S>
struct alignas(16) TokenScratch {
  float values[S::warps][32];
  float lists[S::warps][S::best];  // of the groups that stay, in the order of ids
  float ranks[S::warps];           // of groups
  float terms[S::warps][32];
  int2 listed[S::warps][S::best];  // id, and the bits of the score or the logit
  int2 won[S::best];
};

// Who comes before a value, by the signs of differences, which are never rounded to zero. `side` is
// 1 for those that come first among equals, -1 for those that come last: they are before unless
// other - value < 0, or if value - other < 0. Returns the number of such signs among four; of a
// side of 0, where -0 has one too, nothing is said. -inf - -inf counts as no sign.
__device__ __forceinline__ int count_signs(const float4& others, float value, float side) {
  const auto sign = [&](float other) {
    return static_cast<int>(sign_of(fused(other, side, -side * value)));
  };
  return (sign(others.x) + sign(others.y)) + (sign(others.z) + sign(others.w));
}

// How many of a warp's values come before this lane's: `values` of its lanes. Equals: the lower
// lane first.
__device__ __forceinline__ int rank_in_warp(const float* values, float value, int lane) {
  const auto* const quads = reinterpret_cast<const float4*>(values);
  const int quad = lane >> 2, j = lane & 3;
  const float4 own = quads[quad];
  int rank = 4 * quad;
  rank += j > 0 ? (own.x >= value ? 1 : 0) : 0;
  rank += j > 1 ? (own.y >= value ? 1 : 0) : j < 1 ? (own.y > value ? 1 : 0) : 0;
  rank += j > 2 ? (own.z >= value ? 1 : 0) : j < 2 ? (own.z > value ? 1 : 0) : 0;
  rank += j < 3 ? (own.w > value ? 1 : 0) : 0;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const bool first = quad + i >= 8;
    const int signs = count_signs(quads[(quad + i) & 7], value, first ? 1.0F : -1.0F);
    rank += first ? -signs : signs;
  }
  return rank;
}

// What ranks a group, from the values of its warp.
__device__ __forceinline__ float rank_of_group(float value, bool by_two_best, int lane) {
  const std::int32_t key = ordered(value);
  const std::int32_t first = __reduce_max_sync(every_lane, key);
  if (!by_two_best) return float_of_ordered(first);
  const int owner = __ffs(static_cast<int>(__ballot_sync(every_lane, key == first))) - 1;
  const std::int32_t second = __reduce_max_sync(every_lane, lane == owner ? INT32_MIN : key);
  return float_of_ordered(first) + float_of_ordered(second);
}

// A bit for each group that stays; by a whole warp.
template <int groups>
__device__ __forceinline__ std::uint32_t kept_groups(const float* ranks, int keep, int lane) {
  const int own = lane & (groups - 1);
  const float rank = ranks[own];
  const auto* const quads = reinterpret_cast<const float4*>(ranks);
  int better = 0;
#pragma unroll
  for (int i = 0; i < groups / 4; ++i) {
    const float4 others = quads[i];
    const auto is_better = [&](float other, int g) {
      return (g < own ? other >= rank : other > rank) ? 1 : 0;
    };
    better += is_better(others.x, 4 * i) + is_better(others.y, 4 * i + 1) +
              is_better(others.z, 4 * i + 2) + is_better(others.w, 4 * i + 3);
  }
  constexpr std::uint32_t all = (1U << groups) - 1;
  return __ballot_sync(every_lane, better < keep) & all;
}

// The whole block calls it: `warp` and `lane` of the thread, `raw` the raw logit of expert
// 32 * warp + lane, anything past E. Route: DeviceRoute or TokenRoute. `usual`:
// is_softmax_of_top().
template <class S, bool usual, class Route>
__device__ __forceinline__ void route_token(const Route& r, float raw, TokenScratch<S>& scratch,
                                            std::int64_t t, int warp, int lane) {
  const int e = 32 * warp + lane, k = r.rule.top_k;
  const bool is_expert = e < r.rule.experts;
  static_assert(!usual || S::ranked == Ranked::logit);
  if constexpr (!usual) {
    if (is_expert && r.router_bias.data != nullptr) raw = raw + element(r.router_bias, e);
  }
  float kept = sanitised(raw);
  float value = kept;
  if constexpr (S::ranked != Ranked::logit) {
    const float bias = is_expert ? static_cast<const float*>(r.selection_bias.data)[e] : 0.0F;
    if (r.rule.weigh == Weigh::sigmoid) kept = sigmoid(kept);
    if (r.rule.weigh == Weigh::sqrt_softplus) kept = sqrt_softplus(kept);
    value = sanitised((r.rule.scores_rank ? kept : value) + bias);
  }
  if (!is_expert) value = minus_infinity;
  scratch.values[warp][lane] = value;
  int lists = S::warps, list_of_warp = warp;
  bool stays = true;
  if constexpr (S::in_groups) {
    const float of_group = rank_of_group(value, r.rule.rank_by_two_best, lane);
    if (lane == 0) scratch.ranks[warp] = of_group;
    __syncthreads();
    const std::uint32_t groups = kept_groups<S::warps>(scratch.ranks, r.rule.keep, lane);
    lists = r.rule.keep;
    list_of_warp = __popc(groups & ((1U << warp) - 1));
    stays = (groups >> warp & 1) != 0;
  } else {
    __syncwarp();
  }
  const int rank = stays ? rank_in_warp(scratch.values[warp], value, lane) : S::best;
  const bool sums_all =
      !usual && S::ranked == Ranked::logit && r.rule.weigh == Weigh::softmax_of_all;
  if constexpr (S::warps == 1) {
    if (rank < k) scratch.won[rank] = make_int2(e, bits_of(kept));
    if (sums_all) {
      __syncwarp();
      const float best = float_of(scratch.won[0].y);
      scratch.terms[0][lane] = is_expert ? exp_of_negative(kept - best) : 0.0F;
    }
    __syncwarp();
  } else {
    if (rank < S::best) {
      scratch.lists[list_of_warp][rank] = value;
      scratch.listed[list_of_warp][rank] = make_int2(e, bits_of(kept));
    }
    __syncthreads();
    if (warp < S::counting && 32 * warp < lists * S::best) {
      const int c = 32 * warp + lane;
      const int list = min(c / S::best, lists - 1), at = c % S::best;
      const float mine = scratch.lists[list][at];
      int place = at + S::best * list;
#pragma unroll
      for (int g = 0; g < S::warps; ++g) {
        if (g >= lists) break;
        // Lists are in the order of ids.
        const float side = g < list ? 1.0F : g > list ? -1.0F : 0.0F;
        const auto* const quads = reinterpret_cast<const float4*>(scratch.lists[g]);
        int signs = 0;
#pragma unroll
        for (int i = 0; i < S::best / 4; ++i) signs += count_signs(quads[i], mine, side);
        place += g < list ? -signs : g > list ? signs : 0;
      }
      if (place < k && c < lists * S::best) scratch.won[place] = scratch.listed[list][at];
    }
    if (sums_all) {
      float best = scratch.lists[0][0];
#pragma unroll
      for (int g = 1; g < S::warps; ++g) best = fmaxf(best, scratch.lists[g][0]);
      const float term = exp_of_negative(kept - best);
      scratch.terms[warp][lane] = is_expert ? term : 0.0F;
    }
    if (lists * S::best > 32 || sums_all) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (warp != 0) return;
  }

  const bool has = lane < k;
  const int2 won = scratch.won[has ? lane : 0];
  const auto sum_of = [&](float w) {  // from slot 0 on
    const float of_slot = has ? w : 0.0F;
    float sum = 0;
#pragma unroll
    for (int s = 0; s < S::best; ++s) sum += __shfl_sync(every_lane, of_slot, s);
    return sum;
  };
  float w = float_of(won.y);
  if (usual || r.rule.weigh == Weigh::softmax_of_selected) {
    float best = has ? w : minus_infinity;
    if constexpr (S::ranked == Ranked::logit) {
      best = __shfl_sync(every_lane, best, 0);
    } else {  // a bias may have put another first
#pragma unroll
      for (int step = 1; step < S::best; step *= 2) {
        best = fmaxf(best, __shfl_xor_sync(every_lane, best, step));
      }
    }
    float quotient[1] = {exp_of_mostly_small(w - best)};
    divide_by(quotient, sum_of(quotient[0]));
    w = quotient[0];
  } else if (sums_all) {
    float sum = scratch.terms[0][lane];
#pragma unroll
    for (int g = 1; g < S::warps; ++g) sum += scratch.terms[g][lane];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(every_lane, sum, step);
    w = exp_of_negative(w - __shfl_sync(every_lane, w, 0)) / sum;
  } else if constexpr (S::ranked == Ranked::logit) {
    if (r.rule.weigh == Weigh::sigmoid) w = sigmoid(w);
    if (r.rule.weigh == Weigh::sqrt_softplus) w = sqrt_softplus(w);
  }
  float sum = 0;
  if constexpr (!usual) {
    if (r.rule.renormalize) sum = sum_of(w);
  }
  if (!has) return;
  if constexpr (!usual) w = finite_weight(final_weight(r, w, sum, won.x));
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + lane] = won.x;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + lane] = w;
  if constexpr (usual) return;
  if (r.replay.data != nullptr) {
    r.replay.data[t * r.replay.stride + lane] = static_cast<std::int16_t>(won.x);
  }
}

}  // namespace shunt::routing
