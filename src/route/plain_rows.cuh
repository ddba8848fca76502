// From the logits of several tokens to their ids and weights, by one warp, where nothing but logits
// is compared and k is at most 8: what ends most routers, and the shortest way there is. f32 logits
// that are not all finite, or tie where that matters, and 16 bits with infinities among the best
// are selected once more, in k rounds. Shapes and the experts of a lane are those of FastShape
// (fast_rows.cuh).
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
#include "route/token_route.cuh"

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

// The slots of a lane: q * each + i, i < each.
template <class S>
constexpr int slots_of_lane = S::best > S::lanes ? S::best / S::lanes : 1;

// Writes a lane's values of a row of outputs from `slot` on, as one vector where rows lie so.
template <int each, class T>
__device__ __forceinline__ void store_slots(const DeviceRows<T>& rows, std::int64_t t, int slot,
                                            int k, const T (&values)[each]) {
  T* const to = rows.data + t * rows.stride + slot;
  constexpr int together = each < 4 ? each : 4;
  struct alignas(together * sizeof(T)) Vector {
    T of[together];
  };
  const bool vectors =
      k % together == 0 && ((reinterpret_cast<std::uintptr_t>(rows.data) |
                             static_cast<std::uintptr_t>(rows.stride * sizeof(T))) %
                            sizeof(Vector)) == 0;
#pragma unroll
  for (int i = 0; i < each; i += together) {
    if (together > 1 && vectors) {
      if (slot + i >= k) continue;
      Vector vector;
#pragma unroll
      for (int j = 0; j < together; ++j) vector.of[j] = values[i + j];
      *reinterpret_cast<Vector*>(to + i) = vector;
    } else {
#pragma unroll
      for (int j = 0; j < together; ++j) {
        if (slot + i + j < k) to[i + j] = values[i + j];
      }
    }
  }
}

// Lane q of a token holds its slots' `logits` and `ids`; `best`: the largest logit. All finite.
// `usual`: a softmax of the selected and nothing else, S::best of them.
template <class S, bool usual, class Route>
__device__ __forceinline__ void store_plain(const Route& r, const float (&logits)[slots_of_lane<S>],
                                            const std::int32_t (&ids)[slots_of_lane<S>], float best,
                                            float sum_of_all, std::int64_t t, int q, bool stores) {
  constexpr int each = slots_of_lane<S>;
  const auto& rule = r.rule;
  const int slot = q * each, k = usual ? S::best : rule.top_k;
  float w[each];
  const auto sum_of_slots = [&] {  // from slot 0 on
    float own[each];
#pragma unroll
    for (int i = 0; i < each; ++i) own[i] = slot + i < k ? w[i] : 0.0F;
    float sum = 0;
#pragma unroll
    for (int s = 0; s < S::best; ++s) {
      sum += S::lanes == 1 ? own[s % each]
                           : __shfl_sync(every_lane, own[s % each], s / each, S::lanes);
    }
    return sum;
  };
#pragma unroll
  for (int i = 0; i < each; ++i) w[i] = logits[i] + 0.0F;  // -0 is 0
  if (usual || rule.weigh == Weigh::softmax_of_selected) {
#pragma unroll
    for (int i = 0; i < each; ++i) w[i] = exp_of_mostly_small(w[i] - (best + 0.0F));
    divide_by(w, sum_of_slots());
  } else if (rule.weigh == Weigh::softmax_of_all) {
#pragma unroll
    for (int i = 0; i < each; ++i) w[i] = exp_of_negative(w[i] - (best + 0.0F)) / sum_of_all;
  } else if (rule.weigh == Weigh::sigmoid) {
#pragma unroll
    for (int i = 0; i < each; ++i) w[i] = sigmoid(w[i]);
  } else if (rule.weigh == Weigh::sqrt_softplus) {
#pragma unroll
    for (int i = 0; i < each; ++i) w[i] = sqrt_softplus(w[i]);
  }
  float sum = 0;
  if constexpr (!usual) {
    if (rule.renormalize) sum = sum_of_slots();
  }
  if (!stores || slot >= k) return;
  if constexpr (!usual) {
#pragma unroll
    for (int i = 0; i < each; ++i) w[i] = finite_weight(final_weight(r, w[i], sum, ids[i]));
  }
  if (r.ids.data != nullptr) store_slots(r.ids, t, slot, k, ids);
  if (r.weights.data != nullptr) store_slots(r.weights, t, slot, k, w);
  if constexpr (usual) return;
  if (r.replay.data != nullptr) {
    std::int16_t narrow[each];
#pragma unroll
    for (int i = 0; i < each; ++i) narrow[i] = static_cast<std::int16_t>(ids[i]);
    store_slots(r.replay, t, slot, k, narrow);
  }
}

template <class V, int P>
__device__ __forceinline__ V key_at(const SortedKeys<V, P>& list, int slot) {
  V key = list.of[0];
#pragma unroll
  for (int i = 1; i < P; ++i) key = i == slot ? list.of[i] : key;
  return key;
}

// What a lane's slots hold of the list.
template <class S, class V>
__device__ __forceinline__ void keys_of_lane(const SortedKeys<V, S::best>& list, int q,
                                             V (&keys)[slots_of_lane<S>]) {
  constexpr int each = slots_of_lane<S>;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    keys[i] = list.of[i];
#pragma unroll
    for (int first = each; first < S::best; first += each) {
      keys[i] = first == q * each ? list.of[first + i] : keys[i];
    }
  }
}

// The key of slot `lane` of a row of raw logits, by the whole warp: k rounds. Rare, but a launch
// waits for it: of 8 x 4096 rows of the benchmark's f32 sums one has a tie among its 4 best.
template <class T>
__device__ __noinline__ std::int64_t select_in_rounds(const T* row, DeviceVector bias, int experts,
                                                      int k, int lane) {
  constexpr int together = 4;
  std::int64_t last = INT64_MAX, mine = no_key;
#pragma unroll 1
  for (int s = 0; s < k; ++s) {
    std::int64_t best = no_key;
#pragma unroll 1
    for (int first = lane; first < experts; first += 32 * together) {
      float x[together];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        x[i] = static_cast<float>(row[min(first + 32 * i, experts - 1)]);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int e = min(first + 32 * i, experts - 1);
        if (bias.data != nullptr) x[i] = x[i] + element(bias, e);
        const std::int64_t key = key_of(sanitised(x[i]), e);
        best = key < last && key > best ? key : best;
      }
    }
    last = warp_max(best);
    if (lane == s) mine = last;
  }
  return mine;
}

// A token that route_plain() leaves, whole, by the whole warp, which sees the row.
template <class T>
__device__ __noinline__ void route_in_rounds(const DeviceRoute& whole, const T* row, std::int64_t t,
                                             int lane) {
  const TokenRoute r(whole);  // its fields would be read anew after every store
  const auto& rule = r.rule;
  const int k = rule.top_k;
  const std::int64_t key = select_in_rounds(row, r.router_bias, rule.experts, k, lane);
  const std::int32_t id = id_of(key);
  const float l = float_of_ordered(static_cast<std::int32_t>(key >> 32));
  const float best = __shfl_sync(every_lane, l, 0);
  const auto sum_of_slots = [k](float w) {  // from slot 0 on
    float sum = 0;
#pragma unroll 1
    for (int s = 0; s < k; ++s) sum += __shfl_sync(every_lane, w, s);
    return sum;
  };
  float w = l;
  if (rule.weigh == Weigh::softmax_of_selected) {
    w = exp_of_negative(l - best);
    w = w / sum_of_slots(w);
  } else if (rule.weigh == Weigh::softmax_of_all) {
    float sum = 0;
#pragma unroll 1
    for (int e = lane; e < rule.experts; e += 32) {
      float x = static_cast<float>(row[e]);
      if (r.router_bias.data != nullptr) x = x + element(r.router_bias, e);
      sum += exp_of_negative(sanitised(x) - best);
    }
    w = exp_of_negative(l - best) / warp_sum(sum);
  } else if (rule.weigh == Weigh::sigmoid) {
    w = sigmoid(l);
  } else if (rule.weigh == Weigh::sqrt_softplus) {
    w = sqrt_softplus(l);
  }
  const float sum = rule.renormalize ? sum_of_slots(w) : 0.0F;
  if (lane >= k) return;
  w = finite_weight(final_weight(r, w, sum, id));
  if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + lane] = id;
  if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + lane] = w;
  if (r.replay.data != nullptr) {
    r.replay.data[t * r.replay.stride + lane] = static_cast<std::int16_t>(id);
  }
}

// Ids that tie meet in one slot, in any order; their token is left whichever stays.
__device__ __forceinline__ void take_slot(std::int32_t& slot, std::int32_t id) {
#if defined(__CUDA_ARCH__)
  atomicExch(&slot, id);
#else
  slot = id;
#endif
}

// All 32 lanes call it together; `t` and `there` are those of the lane's token. `v`: the raw logits
// of the lane's experts, anything past E; spoilt. `row`: the raw logits of the lane's token again.
// `won`: room for S::best ids of the lane's token, in shared memory. Returns the lanes whose tokens
// are left to route_in_rounds().
template <class S>
__device__ __forceinline__ std::uint32_t route_plain(const DeviceRoute& r, const float* row,
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
    // Where fewer than k are numbers above -inf, what lies past E would reach it, too: -inf - -inf
    // has no sign bit. Such a row is left in any case.
    mine[i] = there && least > minus_infinity ? ~below & all : 0;
  }
  std::int32_t last = -1;  // the lane's id in slot k - 1
  const auto place = [&](int n) {
    const std::int32_t id = S::expert(n, q);
    float x = row[id];
    if (biased) x = x + element(r.router_bias, id);
    int slot = 0;
#pragma unroll
    for (int i = 0; i < S::best; ++i) slot += list.of[i] > x ? 1 : 0;
    if (slot >= k) return;  // not a number
    take_slot(won[slot], id);
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
  store_plain<S, false>(r, {key_at(list, q)}, {id}, list.of[0], sum_of_all, t, q,
                        there && !all_left);
  return lanes_left;
}

// ---- logits of 16 bits --------------------------------------------------------------------------
//
// Two to a word. A key is the number in the upper half and 0xffff - id in the lower, the other way
// round below zero, and is compared as f32, whatever 16 bits mean: f32 orders them all, but for
// those that would be no f32 at all.

__device__ __forceinline__ float widened(std::uint32_t bits, bool bf16) {
  if (bf16) return float_of(static_cast<std::int32_t>(bits << 16));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Sign and magnitude of the largest finite numbers.
constexpr std::uint32_t largest_bf16 = 0x7f7f, largest_f16 = 0x7bff;

// Of both numbers of a word: the lowest finite one for NaN and -inf, the largest for +inf, 0 for
// -0.
template <bool bf16>
__device__ __forceinline__ std::uint32_t finite_pair(std::uint32_t word) {
  constexpr std::uint32_t most = bf16 ? largest_bf16 : largest_f16;
#if defined(__CUDA_ARCH__)
  std::uint32_t finite;
  if constexpr (bf16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(finite) : "r"(word), "r"((most | 0x8000) * 0x10001U));
    asm("min.bf16x2 %0, %0, %1;" : "+r"(finite) : "r"(most * 0x10001U));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(finite) : "r"(0x3f803f80U), "r"(0U));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(finite) : "r"(word), "r"((most | 0x8000) * 0x10001U));
    asm("min.f16x2 %0, %0, %1;" : "+r"(finite) : "r"(most * 0x10001U));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(finite) : "r"(0U));
  }
  return finite;
#else
  std::uint32_t finite = 0;
  for (int half = 0; half < 32; half += 16) {
    std::uint32_t bits = word >> half & 0xffff;
    const bool number = (bits & 0x7fff) <= most + 1;  // or infinite
    if (!number) bits = most | 0x8000;
    if ((bits & 0x7fff) > most) bits = most | (bits & 0x8000);
    if (bits == 0x8000) bits = 0;
    finite |= bits << half;
  }
  return finite;
#endif
}

// `base`: 0xffff less what the lane adds to an id; `id`: the rest of it, of other bits.
template <bool upper>
__device__ __forceinline__ float packed_key(std::uint32_t word, std::uint32_t base,
                                            std::uint32_t id) {
#if defined(__CUDA_ARCH__)
  std::uint32_t key;  // the number, and its sign 16 times
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(key) : "r"(word), "n"(upper ? 0x32bb : 0x1099));
#else
  const std::uint32_t bits = upper ? word >> 16 : word & 0xffff;
  const std::uint32_t key = bits << 16 | (bits >> 15 != 0 ? 0xffffU : 0U);
#endif
  return float_of(static_cast<std::int32_t>(key ^ base ^ id));
}
__device__ __forceinline__ std::int32_t id_of_packed(float key) {
  const std::int32_t bits = bits_of(key);
  return (bits ^ ~(bits >> 31)) & 0xffff;
}
__device__ __forceinline__ float value_of_packed(float key, bool bf16) {
  return widened(static_cast<std::uint32_t>(bits_of(key)) >> 16, bf16);
}

// Tokens of which a lane is in `left` are selected in rounds. `row`: of the lane's token.
template <class S, class T>
__device__ __forceinline__ void select_again(const T* row, const DeviceVector& bias, int experts,
                                             int k, std::uint32_t left, int lane,
                                             float (&logits)[slots_of_lane<S>],
                                             std::int32_t (&ids)[slots_of_lane<S>], float& best) {
  constexpr int each = slots_of_lane<S>;
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < S::tokens; ++i) {
    if ((left >> (i * S::lanes) & of_token) == 0) continue;
    const auto address = __shfl_sync(
        every_lane, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(row)),
        i * S::lanes);
    const std::int64_t key =
        select_in_rounds(reinterpret_cast<const T*>(address), bias, experts, k, lane);
    const auto value_of = [](std::int64_t of) {
      return float_of_ordered(static_cast<std::int32_t>(of >> 32));
    };
    const std::int64_t first = __shfl_sync(every_lane, key, 0);
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const std::int64_t own = __shfl_sync(every_lane, key, (lane & (S::lanes - 1)) * each + j);
      if (lane / S::lanes != i) continue;
      ids[j] = id_of(own);
      logits[j] = value_of(own);
      best = value_of(first);
    }
  }
}

// As route_plain(). `words`: the raw logits of the lane's experts, two a word, anything past E;
// spoilt. No router bias. `usual`: that of store_plain(), and E fills the blocks.
template <class S, bool usual, class Route>
__device__ __forceinline__ void route_packed(const Route& r, bool bf16, const std::uint16_t* row,
                                             std::uint32_t (&words)[(S::held + 1) / 2],
                                             std::int64_t t, bool there, int lane) {
  static_assert(S::run % 2 == 0 || S::run == 1);
  const auto& rule = r.rule;
  const int q = lane & (S::lanes - 1), k = usual ? S::best : rule.top_k;
  if (bf16) {
#pragma unroll
    for (std::uint32_t& word : words) word = finite_pair<true>(word);
  } else {
#pragma unroll
    for (std::uint32_t& word : words) word = finite_pair<false>(word);
  }
  float keys[S::held];
  const std::uint32_t base = 0xffff ^ static_cast<std::uint32_t>(q * S::run);
#pragma unroll
  for (int n = 0; n < S::held; ++n) {
    const auto id = static_cast<std::uint32_t>(S::expert(n, 0));
    keys[n] = n % 2 != 0 ? packed_key<true>(words[n / 2], base, id)
                         : packed_key<false>(words[n / 2], base, id);
  }
  if (!usual && rule.experts < S::width * S::blocks) {
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      keys[n] = S::expert(n, q) < rule.experts ? keys[n] : minus_infinity;
    }
  }
  const SortedKeys<float, S::best> list = best_keys<S>(keys, minus_infinity);
  // The largest and the lowest numbers may have been infinite.
  const std::uint32_t most = (bf16 ? largest_bf16 : largest_f16) << 16;
  const float least = usual ? list.of[S::best - 1] : key_at(list, k - 1);
  const bool left = list.of[0] >= float_of(static_cast<std::int32_t>(most)) ||
                    least <= float_of(static_cast<std::int32_t>(most | 0x80000000U));
  float best = value_of_packed(list.of[0], bf16);
  float sum_of_all = 1;
  if (!usual && rule.weigh == Weigh::softmax_of_all) {
    float v[S::held];
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      const std::uint32_t bits = n % 2 != 0 ? words[n / 2] >> 16 : words[n / 2] & 0xffff;
      v[n] = S::expert(n, q) < rule.experts ? widened(bits, bf16) : minus_infinity;
    }
    sum_of_all = sum_of_exponentials<S>(v, best);
  }
  constexpr int each = slots_of_lane<S>;
  float own[each], logits[each];
  std::int32_t ids[each];
  keys_of_lane<S>(list, q, own);
#pragma unroll
  for (int i = 0; i < each; ++i) {
    logits[i] = value_of_packed(own[i], bf16);
    ids[i] = id_of_packed(own[i]);
  }
  const std::uint32_t lanes_left = __ballot_sync(every_lane, left && there);
  if (lanes_left != 0) [[unlikely]] {
    const auto again = [&]<class T>(const T* numbers) {
      select_again<S>(numbers, {}, rule.experts, k, lanes_left, lane, logits, ids, best);
      if constexpr (!usual) {
        if (rule.weigh != Weigh::softmax_of_all) return;
        float v[S::held];
#pragma unroll
        for (int n = 0; n < S::held; ++n) {
          const int e = S::expert(n, q);
          v[n] = minus_infinity;
          if (e < rule.experts) v[n] = sanitised(static_cast<float>(numbers[e]));
        }
        sum_of_all = sum_of_exponentials<S>(v, best);
      }
    };
    bf16 ? again(reinterpret_cast<const __nv_bfloat16*>(row))
         : again(reinterpret_cast<const __half*>(row));
  }
  store_plain<S, usual>(r, logits, ids, best, sum_of_all, t, q, there);
}

}  // namespace shunt::routing
