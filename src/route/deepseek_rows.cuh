// DeepSeek-V3's rule (is_deepseek_v3()), a token a warp: 256 experts in 8 groups of which 4 stay, a
// sigmoid and a bias, the 8 best. Everything is exact and no row is a special case, so that nothing
// is done twice.
//
// Lane 4 g + j holds two buckets of group g: experts 32 g + 4 j .. + 3, and 16 further on.
//   1. Scores, and values to compare. The two best of each group, by two exchanges, rank it.
//   2. The 32 buckets of the groups that stay go to shared memory in the order of ids. Lane b ranks
//      bucket b by (largest value, lower ids first): it counts who comes before.
//   3. The 8 experts are among the first 8 buckets: whoever is in a later one has 8 before it, one
//      in each of those. That is 32 experts, one a lane, in the order of ids; each counts again,
//      and that is its slot.
//   4. The slot's owner weighs and stores it.
// 650 instructions (predicted: 550).
#pragma once

#include "route/weights.cuh"

namespace shunt::routing {

struct DeepseekRoute {
  const float* logits;
  std::int64_t stride;  // elements from row to row: whole vectors of 4
  const float* bias;    // aligned to vectors of 4
  DeviceRows<std::int32_t> ids;
  DeviceRows<float> weights;
  std::int64_t tokens;
  const std::int32_t* valid_tokens;
  float epsilon, factor;
};

constexpr int deepseek_k = 8, deepseek_keep = 4;

// A warp's, in shared memory.
struct alignas(16) DeepseekScratch {
  float tops[32];     // the largest value of each bucket
  float4 values[32];  // of each bucket
  float4 scores[32];
  std::int32_t ids[32];   // the first of each bucket
  float last_values[32];  // of the first 8 buckets
  float last_scores[32];
  std::int32_t last_ids[8];
  float won[deepseek_k];
};

struct TwoBest {
  float first, second;
};
__device__ __forceinline__ TwoBest two_best(const TwoBest& a, const TwoBest& b) {
  return {fmaxf(a.first, b.first), fmaxf(fmaxf(a.second, b.second), fminf(a.first, b.first))};
}
__device__ __forceinline__ TwoBest two_best_of_4(const float* v) {
  const TwoBest low{fmaxf(v[0], v[1]), fminf(v[0], v[1])};
  const TwoBest high{fmaxf(v[2], v[3]), fminf(v[2], v[3])};
  return two_best(low, high);
}

// sigmoid() for |l| < 86.
__device__ __forceinline__ float sigmoid_of_small(float l) {
  const float e = exp_of_small_negative(-fabsf(l));
  const float a = l < 0 ? e : 1.0F, b = 1.0F + e;
  return quotient(a, b, reciprocal(b));  // where a is tiny b is 1, and nothing is rounded
}

// Scores of any logits. Not inlined, so as not to lie in the way.
__device__ __noinline__ inline void score_any(const float* from, float4* to) {
#pragma unroll 1
  for (int n = 0; n < 4; ++n) {
    reinterpret_cast<float*>(to)[n] = sigmoid(sanitised(from[n]));
  }
}

// How many groups come before this lane's: a lower one that is not less, a higher one that is
// larger. Who is less shows in the sign of a difference; -inf - -inf has none.
__device__ __forceinline__ int groups_before(float rank, int group) {
  int before = group;
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const float other = __shfl_sync(every_lane, rank, 4 * g);
    const bool lower = g < group;
    const int sign = static_cast<int>(sign_of(lower ? other - rank : rank - other));
    before += lower ? -sign : sign;
  }
  return before;
}

// How many of a warp's values come before this lane's, equals the lower lane first: `values` of its
// lanes, finite and none -0. An other is larger where value - other has a sign; it is not less
// where that is so of the number next below the value.
__device__ __forceinline__ int rank_in_order(const float* values, float value, int lane) {
  const auto* const quads = reinterpret_cast<const float4*>(values);
  const int quad = lane >> 2, j = lane & 3;
  const float4 own = quads[quad];
  const float next_below = float_of_ordered(ordered(value) - 1);
  std::uint32_t before[4] = {};  // short chains
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 others = quads[i];
    const float from = i < quad ? next_below : value;
    before[0] += sign_of(from - others.x);
    before[1] += sign_of(from - others.y);
    before[2] += sign_of(from - others.z);
    before[3] += sign_of(from - others.w);
  }
  before[0] += j > 0 && own.x == value ? 1 : 0;
  before[1] += j > 1 && own.y == value ? 1 : 0;
  before[2] += j > 2 && own.z == value ? 1 : 0;
  return static_cast<int>((before[0] + before[1]) + (before[2] + before[3]));
}

// By a warp. `row`: the token's logits.
__device__ __forceinline__ void route_deepseek(const DeepseekRoute& r, const float* row,
                                               DeepseekScratch& s, std::int64_t t, int lane) {
  const int group = lane >> 2, expert = 32 * group + 4 * (lane & 3);
  const auto load = [expert](const float* from, float(&to)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(from + expert);
    const float4 high = *reinterpret_cast<const float4*>(from + expert + 16);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  };
  float l[8], bias[8], scores[8], values[8];
  load(row, l);
  load(r.bias, bias);
  float magnitude = 0, zeros[2] = {0, 0};  // or NaN
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    scores[n] = sigmoid_of_small(l[n]);
    values[n] = scores[n] + bias[n];
    magnitude = fmaxf(magnitude, fabsf(l[n]));
    zeros[n & 1] = fused(values[n], 0.0F, zeros[n & 1]);
  }
  if (!(magnitude < 86.0F && zeros[0] + zeros[1] == 0)) [[unlikely]] {
    score_any(row + expert, s.values + lane);
    score_any(row + expert + 16, s.scores + lane);
    const float4 low = s.values[lane], high = s.scores[lane];
    scores[0] = low.x, scores[1] = low.y, scores[2] = low.z, scores[3] = low.w;
    scores[4] = high.x, scores[5] = high.y, scores[6] = high.z, scores[7] = high.w;
#pragma unroll
    for (int n = 0; n < 8; ++n) values[n] = sanitised(scores[n] + bias[n]);
  }
  __syncwarp();
  const TwoBest low = two_best_of_4(values), high = two_best_of_4(values + 4);
  TwoBest best = two_best(low, high);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    best = two_best(best, {__shfl_xor_sync(every_lane, best.first, step),
                           __shfl_xor_sync(every_lane, best.second, step)});
  }
  const bool stays = groups_before(best.first + best.second, group) < deepseek_keep;
  const std::uint32_t kept = __ballot_sync(every_lane, stays);
  if (stays) {
    const int place = 2 * __popc(kept & ((1U << (4 * group)) - 1)) + (lane & 3);
    s.tops[place] = low.first;
    s.tops[place + 4] = high.first;
    s.values[place] = make_float4(values[0], values[1], values[2], values[3]);
    s.values[place + 4] = make_float4(values[4], values[5], values[6], values[7]);
    s.scores[place] = make_float4(scores[0], scores[1], scores[2], scores[3]);
    s.scores[place + 4] = make_float4(scores[4], scores[5], scores[6], scores[7]);
    s.ids[place] = expert;
    s.ids[place + 4] = expert + 16;
  }
  __syncwarp();
  const float4 bucket_values = s.values[lane], bucket_scores = s.scores[lane];
  const std::int32_t bucket_id = s.ids[lane];
  const bool among = rank_in_order(s.tops, s.tops[lane], lane) < deepseek_k;
  const std::uint32_t first = __ballot_sync(every_lane, among);
  if (among) {
    const int place = __popc(first & ((1U << lane) - 1));
    *reinterpret_cast<float4*>(s.last_values + 4 * place) = bucket_values;
    *reinterpret_cast<float4*>(s.last_scores + 4 * place) = bucket_scores;
    s.last_ids[place] = bucket_id;
  }
  __syncwarp();
  const std::int32_t id = s.last_ids[lane >> 2] + (lane & 3);
  const float score = s.last_scores[lane];
  const int slot = rank_in_order(s.last_values, s.last_values[lane], lane);
  if (slot < deepseek_k) s.won[slot] = score;
  __syncwarp();
  const float4 won = *reinterpret_cast<const float4*>(s.won);
  const float4 others = *reinterpret_cast<const float4*>(s.won + 4);
  float sum = won.x;  // from slot 0 on
  sum += won.y;
  sum += won.z;
  sum += won.w;
  sum += others.x;
  sum += others.y;
  sum += others.z;
  sum += others.w;
  if (slot >= deepseek_k) return;
  const float w = renormalised(score, sum, r.epsilon, false) * r.factor;
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + slot] = id;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + slot] = finite_weight(w);
}

}  // namespace shunt::routing
