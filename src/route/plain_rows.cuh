// From the logits of several tokens to their ids and weights, by one warp, where nothing but logits
// is compared and k is at most 8: what ends most routers, and the shortest way there is. What it
// cannot decide it leaves to rows.cuh: tokens whose logits are not all finite, or tie where that
// matters. Shapes and the experts of a lane are those of FastShape (fast_rows.cuh).
//
//   1. Every lane sorts the P largest of its values; lanes merge their lists pairwise, until each
//      has the P largest of its token. The k-th is a threshold that is exact.
//   2. A lane that holds a value which reaches it counts the list's that are larger: that is the
//      slot, and the id goes there, through shared memory.
//   3. Lane s weighs slot s. Two ids that meet in the last slot, or neighbours of the list that are
//      equal, are ties.
// Values of 16 bits leave room for the id beside them in the key that is sorted: no ties, no
// step 2.
//
// 32 tokens of 64, 128 or 256 experts, top 4, by 8 warps that have nothing else to do: 2150, 2450
// and 3230 cycles on an NVIDIA H200 (docs/notes/cuda-route.md).
#pragma once

#include "route/fast_rows.cuh"

namespace shunt::routing {

// Greatest first.
template <class V, int P>
struct SortedKeys {
  V of[P];
};
// `list`: sorted, of this lane and those that it has merged with. Returns S::best of all.
template <class S, int step, class V, int have>
__device__ __forceinline__ SortedKeys<V, S::best> merge_keys(const V (&list)[have], V nothing) {
  if constexpr (step == S::lanes) {
    SortedKeys<V, S::best> all;
#pragma unroll
    for (int i = 0; i < S::best; ++i) all.of[i] = i < have ? list[i % have] : nothing;
    return all;
  } else if constexpr (have < S::best) {
    V both[2 * have];
#pragma unroll
    for (int i = 0; i < have; ++i) {
      both[i] = list[i];
      both[2 * have - 1 - i] = __shfl_xor_sync(every_lane, list[i], step);
    }
    sort_bitonic_keys(both);
    return merge_keys<S, 2 * step>(both, nothing);
  } else {
    V both[have];
#pragma unroll
    for (int i = 0; i < have; ++i) {
      both[i] = larger_key(list[i], __shfl_xor_sync(every_lane, list[have - 1 - i], step));
    }
    sort_bitonic_keys(both);
    return merge_keys<S, 2 * step>(both, nothing);
  }
}

// The S::best largest of a token's keys, greatest first, in each of its lanes.
template <class S, class V>
__device__ __forceinline__ SortedKeys<V, S::best> best_keys(const V (&keys)[S::held], V nothing) {
  constexpr int have = S::held < S::best ? S::held : S::best;
  V list[have];
#pragma unroll
  for (int i = 0; i < have; ++i) list[i] = keys[i];
  sort_keys(list);
#pragma unroll
  for (int first = have; first < S::held; first += have) {
    V next[have];
#pragma unroll
    for (int i = 0; i < have; ++i) next[i] = keys[first + i];
    sort_keys(next);
#pragma unroll
    for (int i = 0; i < have; ++i) list[i] = larger_key(list[i], next[have - 1 - i]);
    sort_bitonic_keys(list);
  }
  return merge_keys<S, 1>(list, nothing);
}

// Lane q of a token holds slot q, `logit` and `id`; `best`: the largest logit. Both finite.
template <class S>
__device__ __forceinline__ void store_plain(const DeviceRoute& r, float logit, std::int32_t id,
                                            float best, float sum_of_all, std::int64_t t, int q,
                                            bool stores) {
  const Rule& rule = r.rule;
  const auto sum_of = [&](float w) {  // from slot 0 on
    const float own = q < rule.top_k ? w : 0.0F;
    float sum = 0;
#pragma unroll
    for (int s = 0; s < S::best; ++s) sum += __shfl_sync(every_lane, own, s, S::lanes);
    return sum;
  };
  float w = logit + 0.0F;  // -0 is 0
  if (rule.weigh == Weigh::softmax_of_selected) {
    w = exp_of_negative(w - (best + 0.0F));
    w = w / sum_of(w);
  } else if (rule.weigh == Weigh::softmax_of_all) {
    w = exp_of_negative(w - (best + 0.0F)) / sum_of_all;
  } else if (rule.weigh == Weigh::sigmoid) {
    w = sigmoid(w);
  } else if (rule.weigh == Weigh::sqrt_softplus) {
    w = sqrt_softplus(w);
  }
  const float sum = rule.renormalize ? sum_of(w) : 0.0F;
  if (!stores || q >= rule.top_k) return;
  w = finite_weight(final_weight(r, w, sum, id));
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + q] = id;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + q] = w;
  if (r.replay.data != nullptr) {
    r.replay.data[t * r.replay.stride + q] = static_cast<std::int16_t>(id);
  }
}

template <class V, int P>
__device__ __forceinline__ V key_at(const SortedKeys<V, P>& list, int slot) {
  V key = list.of[0];
#pragma unroll
  for (int i = 1; i < P; ++i) key = i == slot ? list.of[i] : key;
  return key;
}

// All 32 lanes call it together; `t` and `there` are those of the lane's token. `v`: the raw logits
// of the lane's experts, anything past E; spoilt. source(e): the raw logit of expert e of the
// lane's token again. `won`: room for S::best ids of the lane's token, in shared memory. Returns
// the lanes whose tokens are left to do.
template <class S, class Source>
__device__ __forceinline__ std::uint32_t route_plain(const DeviceRoute& r, const Source& source,
                                                     float (&v)[S::held], std::int32_t* won,
                                                     std::int64_t t, bool there, int lane) {
  const Rule& rule = r.rule;
  const int q = lane & (S::lanes - 1), k = rule.top_k;
  const bool biased = r.router_bias.data != nullptr;
  if (biased) add_router_bias<S>(r.router_bias, rule.experts, q, v);
  float zeros[2] = {0, 0};  // or NaN; two chains
#pragma unroll
  for (int n = 0; n < S::held; ++n) zeros[n & 1] = fused(v[n], 0.0F, zeros[n & 1]);
  if (rule.experts < 32 * S::blocks) {
#pragma unroll
    for (int n = 0; n < S::held; ++n) v[n] = S::expert(n, q) < rule.experts ? v[n] : minus_infinity;
  }
  const SortedKeys<float, S::best> list = best_keys<S>(v, minus_infinity);
  const float least = key_at(list, k - 1);
  bool left = !(zeros[0] + zeros[1] == 0);
#pragma unroll
  for (int i = 0; i + 1 < S::best; ++i) left |= i + 1 < k && list.of[i] == list.of[i + 1];
  float sum_of_all = 1;
  if (rule.weigh == Weigh::softmax_of_all) sum_of_all = sum_of_exponentials<S>(v, list.of[0]);
  // A bit for each that reaches it, by the sign of the difference. (By comparisons nvcc 13.0 goes
  // wrong where there are two: it then asks for both bits where it should ask for any.) -0 - -0 is
  // 0, but -0 - 0 is -0.
  const float signed_least = least == 0 ? -0.0F : least;
  constexpr int words = (S::held + 31) / 32;
  std::uint32_t mine[words];
#pragma unroll
  for (int i = 0; i < words; ++i) {
    constexpr int most = S::held < 32 ? S::held : 32;
    std::uint32_t below = 0;
#pragma unroll
    for (int n = most - 1; n >= 0; --n) {
      const float difference = v[32 * i + n] - signed_least;
      below = __funnelshift_l(static_cast<std::uint32_t>(bits_of(difference)), below, 1);
    }
    constexpr std::uint32_t all = most == 32 ? every_lane : (1U << (most & 31)) - 1;
    mine[i] = there ? ~below & all : 0;
  }
  std::int32_t last = -1;  // the lane's id in slot k - 1
  const auto place = [&](int n) {
    const std::int32_t id = S::expert(n, q);
    float x = source(id);
    if (biased) x = x + element(r.router_bias, id);
    int slot = 0;
#pragma unroll
    for (int i = 0; i < S::best; ++i) slot += list.of[i] > x ? 1 : 0;
    if (slot >= k) return;  // not a number
    won[slot] = id;
    if (slot < k - 1) return;
    left |= last >= 0;
    last = id;
  };
#pragma unroll
  for (int i = 0; i < words; ++i) {
    std::uint32_t left_of_word = mine[i];
    if (left_of_word == 0) continue;
    // Few lanes have more than two: those side by side, from both ends.
    const int low = __ffs(static_cast<int>(left_of_word)) - 1;
    const int high = 31 - __clz(static_cast<int>(left_of_word));
    left_of_word &= ~(1U << low | 1U << high);
    place(32 * i + low);
    if (high != low) place(32 * i + high);
#pragma unroll 1
    while (left_of_word != 0) {
      const int n = __ffs(static_cast<int>(left_of_word)) - 1;
      left_of_word &= left_of_word - 1;
      place(32 * i + n);
    }
  }
  __syncwarp();
  const std::int32_t in_last = won[k - 1];
  left |= last >= 0 && last != in_last;
  const std::int32_t id = won[q < S::best ? q : 0];
  // Of any lane of a token, for all of them.
  const std::uint32_t lanes_left = __ballot_sync(every_lane, left && there);
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
  const bool all_left = (lanes_left >> (lane & ~(S::lanes - 1)) & of_token) != 0;
  store_plain<S>(r, key_at(list, q), id, list.of[0], sum_of_all, t, q, there && !all_left);
  return lanes_left;
}

// ---- logits of 16 bits --------------------------------------------------------------------------

// bf16 or f16 in the upper half, id's complement in the lower. -0 is less than 0 here.
__device__ __forceinline__ std::int32_t packed_key(std::uint32_t bits, std::int32_t id) {
  const auto upper = static_cast<std::int32_t>(bits << 16);
  return (upper ^ ((upper >> 31) & 0x7fff0000)) | (0xffff - id);
}
__device__ __forceinline__ float widened(std::uint32_t bits, bool bf16) {
  if (bf16) return float_of(static_cast<std::int32_t>(bits << 16));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float value_of_packed(std::int32_t key, bool bf16) {
  const std::int32_t upper = key ^ ((key >> 31) & 0x7fff0000);
  return widened(static_cast<std::uint32_t>(upper) >> 16, bf16);
}

// As route_plain(). `bits`: the raw logits of the lane's experts, anything past E. No router bias.
template <class S>
__device__ __forceinline__ std::uint32_t route_packed(const DeviceRoute& r, bool bf16,
                                                      const std::uint32_t (&bits)[S::held],
                                                      std::int64_t t, bool there, int lane) {
  const Rule& rule = r.rule;
  const int q = lane & (S::lanes - 1), k = rule.top_k;
  std::int32_t keys[S::held];
#pragma unroll
  for (int n = 0; n < S::held; ++n) keys[n] = packed_key(bits[n], S::expert(n, q));
  if (rule.experts < 32 * S::blocks) {
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      keys[n] = S::expert(n, q) < rule.experts ? keys[n] : INT32_MIN;
    }
  }
  SortedKeys<std::int32_t, S::best> list;
  if constexpr (S::best == 1 && S::lanes == 32) {
    std::int32_t own = keys[0];
#pragma unroll
    for (int n = 1; n < S::held; ++n) own = max(own, keys[n]);
    list.of[0] = __reduce_max_sync(every_lane, own);
  } else {
    list = best_keys<S>(keys, INT32_MIN);
  }
  // Infinities and NaN have the largest exponent: from `odd` on, or below its complement. Zeros may
  // differ in their sign.
  const std::int32_t odd = bf16 ? 0x7f800000 : 0x7c000000;
  bool left = list.of[0] >= odd;
#pragma unroll
  for (int i = 0; i < S::best; ++i) {
    const bool zero = static_cast<std::uint32_t>(list.of[i] + 0x10000) < 0x20000U;
    left |= i < k && (zero || list.of[i] < ~odd);
  }
  const float best = value_of_packed(list.of[0], bf16);
  float sum_of_all = 1;
  if (rule.weigh == Weigh::softmax_of_all) {
    float v[S::held];
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      v[n] =
          S::expert(n, q) < rule.experts ? bounded_below(widened(bits[n], bf16)) : minus_infinity;
    }
    sum_of_all = sum_of_exponentials<S>(v, best);
  }
  const std::int32_t key = key_at(list, q);
  store_plain<S>(r, value_of_packed(key, bf16), 0xffff - (key & 0xffff), best, sum_of_all, t, q,
                 there && !left);
  return __ballot_sync(every_lane, left && there);
}

}  // namespace shunt::routing
