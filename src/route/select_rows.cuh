// The selection of one token's experts by one warp, quick and exact: rows.cuh says how.
#pragma once

#include "route/row.cuh"

namespace shunt::routing {

// ---- exact selection ---------------------------------------------------------------------------

template <class Source>
struct Exact {
  const DeviceRoute& r;
  const Source& source;
  Softmax softmax;

  __device__ float score(float l) const {
    switch (r.rule.weigh) {
      case Weigh::softmax_of_all:
        return exp_of_negative(l - softmax.best) / softmax.sum;
      case Weigh::sigmoid:
        return sigmoid(l);
      case Weigh::sqrt_softplus:
        return sqrt_softplus(l);
      default:
        return l;
    }
  }
  // What ranks groups.
  __device__ float ranking(int e) const {
    const float l = finished(r, source(e), e);
    const float base = r.rule.scores_rank ? score(l) : l;
    if (r.selection_bias.data == nullptr) return base;
    return sanitised(base + element(r.selection_bias, e));
  }
  __device__ float compared(int e) const {
    return r.selection_bias.data != nullptr ? ranking(e) : finished(r, source(e), e);
  }
};

// A bit for each group that stays.
template <class Source>
__device__ std::uint64_t kept_groups(const Exact<Source>& exact, int lane) {
  const Rule& rule = exact.r.rule;
  std::int64_t keys[2] = {no_key, no_key};
  for (int g = 0; g < rule.groups; ++g) {
    float first = minus_infinity, second = minus_infinity;
    for (int i = lane; i < rule.group_size; i += 32) {
      const float v = exact.ranking(g * rule.group_size + i);
      second = larger(second, smaller(first, v));
      first = larger(first, v);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(every_lane, first, step);
      const float other_second = __shfl_xor_sync(every_lane, second, step);
      second = larger(larger(second, other_second), smaller(first, other));
      first = larger(first, other);
    }
    const float rank = rule.rank_by_two_best && rule.group_size > 1 ? first + second : first;
    if (lane == (g & 31)) keys[g >> 5] = key_of(rank, g);
  }
  std::uint64_t kept = 0;
  for (int i = 0; i < rule.keep; ++i) {
    const int g = id_of(warp_max(keys[0] > keys[1] ? keys[0] : keys[1]));
    kept |= std::uint64_t{1} << g;
    if (lane == (g & 31)) keys[g >> 5] = no_key;
  }
  return kept;
}

template <class Source>
__device__ __noinline__ Slots<std::int32_t> select_exact(const DeviceRoute& r, const Source& source,
                                                         int lane) {
  Exact<Source> exact{r, source, {}};
  if (r.rule.scores_rank && r.rule.weigh == Weigh::softmax_of_all) {
    exact.softmax = softmax_of(r, source, lane);
  }
  std::uint64_t kept = r.rule.groups > 1 ? kept_groups(exact, lane) : 0;
  Slots<std::int32_t> ids{{0, 0}}, taken{{0, 0}};  // of each group
  std::int64_t last = INT64_MAX;
  for (int s = 0; s < r.rule.top_k; ++s) {
    std::int64_t best = no_key;
    for (int e = lane; e < r.rule.experts; e += 32) {
      if (r.rule.groups > 1 && (kept >> (e / r.rule.group_size) & 1) == 0) continue;
      const std::int64_t key = key_of(exact.compared(e), e);
      if (key < last && key > best) best = key;
    }
    last = warp_max(best);
    const std::int32_t id = id_of(last);
    ids.set(lane, s, id);
    if (r.rule.group_limit > 0) {
      const int group = id / r.rule.group_size;
      const std::int32_t now = taken.get(group) + 1;
      taken.set(lane, group, now);
      if (now == r.rule.group_limit) kept &= ~(std::uint64_t{1} << group);
    }
  }
  return ids;
}

// ---- quick selection ---------------------------------------------------------------------------

// Bits that hold an index below N.
template <int N>
constexpr int index_bits = N <= 1    ? 0
                           : N <= 2  ? 1
                           : N <= 4  ? 2
                           : N <= 8  ? 3
                           : N <= 16 ? 4
                                     : 5;

// Batcher's odd-even merge sort, greatest first; unrolled, so that what is constant falls away.
template <int N>
__device__ __forceinline__ void sort_descending(std::int32_t (&a)[N]) {
#pragma unroll
  for (int p = 1; p < N; p *= 2) {
#pragma unroll
    for (int k = p; k >= 1; k /= 2) {
#pragma unroll
      for (int j = k % p; j + k < N; j += 2 * k) {
#pragma unroll
        for (int i = 0; i < k; ++i) {
          if (i + j + k < N && (i + j) / (2 * p) == (i + j + k) / (2 * p)) {
            const std::int32_t x = a[i + j], y = a[i + j + k];
            a[i + j] = max(x, y);
            a[i + j + k] = min(x, y);
          }
        }
      }
    }
  }
}

// The hardware's own functions: within 2^-22 of the value, an ulp, 2^-22 and 2^-23. On a host, for
// tests, the library's.
#ifdef __CUDA_ARCH__
#define SHUNT_ABOUT(name, instruction, host)                       \
  __device__ __forceinline__ float name(float x) {                 \
    float y;                                                       \
    asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                                      \
  }
#else
#define SHUNT_ABOUT(name, instruction, host) \
  __device__ __forceinline__ float name(float x) { return host; }
#endif
SHUNT_ABOUT(exp2_about, "ex2", ::exp2f(x))
SHUNT_ABOUT(reciprocal_about, "rcp", 1.0F / x)
SHUNT_ABOUT(log2_about, "lg2", ::log2f(x))
SHUNT_ABOUT(sqrt_about, "sqrt", ::sqrtf(x))
#undef SHUNT_ABOUT

// sigmoid within 3e-7: the exponential is within 2^-22 + |l| 2^-24 of itself, which p (1 - p)
// scales down, and the reciprocal within an ulp.
__device__ __forceinline__ float sigmoid_about(float l) {
  return reciprocal_about(1.0F + exp2_about(l * -0x1.715476p+0F));
}

// Drops the keys of groups that do not stay. Returns false where it cannot tell.
template <int N>
__device__ __forceinline__ bool keep_groups(const DeviceRoute& r, const float (&ranked)[N],
                                            float approximation, int lane, bool& stays) {
  const Rule& rule = r.rule;
  float first = ranked[0], second = minus_infinity;
#pragma unroll
  for (int i = 1; i < N; ++i) {
    second = larger(second, smaller(first, ranked[i]));
    first = larger(first, ranked[i]);
  }
  for (int step = 1; step < r.lanes_per_group; step *= 2) {
    const float other = __shfl_xor_sync(every_lane, first, step);
    const float other_second = __shfl_xor_sync(every_lane, second, step);
    second = larger(larger(second, other_second), smaller(first, other));
    first = larger(first, other);
  }
  const float rank = rule.rank_by_two_best && rule.group_size > 1 ? first + second : first;
  const int group = lane / r.lanes_per_group;
  const float margin = approximation > 0 ? 4 * approximation + 5e-7F * fabsf(rank) : 0;
  int surely = 0, perhaps = 0;  // groups that are better
  for (int g = 0; g < rule.groups; ++g) {
    const float other = __shfl_sync(every_lane, rank, g * r.lanes_per_group);
    if (g == group) continue;
    if (margin > 0) {
      surely += other > rank + margin;
      perhaps += other > rank - margin;
    } else {
      surely += other > rank || (other == rank && g < group);
    }
  }
  if (margin == 0) perhaps = surely;
  stays = perhaps < rule.keep;
  const bool unsure = group < rule.groups && !stays && surely < rule.keep;
  return __ballot_sync(every_lane, unsure) == 0;
}

// Exactly, for lanes that hold their experts: k rounds of redux.max over 32-bit values and
// redux.min over the ids that have it, each for the best below the last.
template <int N, bool grouped>
__device__ __noinline__ void select_held(const DeviceRoute& r, const float (&l)[N],
                                         const Softmax& softmax, int lane,
                                         Slots<std::int32_t>& ids) {
  const Rule& rule = r.rule;
  std::int32_t values[N];
  float ranked[N];
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const int e = expert_of<N, grouped>(lane, i);
    float v = l[i];
    if (rule.scores_rank && e < rule.experts) {
      if (rule.weigh == Weigh::sigmoid) v = sigmoid(v);
      if (rule.weigh == Weigh::sqrt_softplus) v = sqrt_softplus(v);
      if (rule.weigh == Weigh::softmax_of_all) {
        v = exp_of_negative(v - softmax.best) / softmax.sum;
      }
    }
    const bool biased = r.selection_bias.data != nullptr && e < rule.experts;
    if (biased) v = sanitised(v + element(r.selection_bias, e));
    ranked[i] = v;
    values[i] = ordered(biased ? v : l[i]);
  }
  bool stays = true;
  if constexpr (grouped) keep_groups<N>(r, ranked, 0, lane, stays);
  int taken = 0;  // of the lane's group
  std::int32_t last = INT32_MAX, last_id = -1;
  for (int s = 0; s < rule.top_k; ++s) {
    std::int32_t best = INT32_MIN, best_id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int e = expert_of<N, grouped>(lane, i);
      const bool open =
          stays && e < rule.experts && (values[i] < last || (values[i] == last && e > last_id));
      if (open && values[i] > best) {
        best = values[i];
        best_id = e;
      }
    }
    last = __reduce_max_sync(every_lane, best);
    last_id = __reduce_min_sync(every_lane, best == last ? best_id : INT32_MAX);
    ids.set(lane, s, last_id);
    if constexpr (grouped) {
      taken += last_id / rule.group_size == lane / r.lanes_per_group;
      stays = stays && (rule.group_limit == 0 || taken < rule.group_limit);
    }
  }
}

// `l`: the finished logits of the lane's experts, -inf past E. Returns false where the ids are not
// certain.
template <int N, bool grouped>
__device__ __forceinline__ bool select_quick(const DeviceRoute& r, const float (&l)[N],
                                             const Softmax& softmax, int lane,
                                             Slots<std::int32_t>& ids) {
  const Rule& rule = r.rule;
  constexpr int bits = index_bits<N>;
  constexpr std::int32_t mask = (1 << bits) - 1;
  float ranked[N];
#pragma unroll
  for (int i = 0; i < N; ++i) ranked[i] = l[i];
  if (rule.scores_rank) {
    switch (rule.weigh) {
      case Weigh::sigmoid:
#pragma unroll
        for (int i = 0; i < N; ++i) ranked[i] = sigmoid_about(l[i]);
        break;
      case Weigh::sqrt_softplus:
#pragma unroll
        for (int i = 0; i < N; ++i) ranked[i] = sqrt_softplus(l[i]);
        break;
      case Weigh::softmax_of_all: {
        const float inverse = 1.0F / softmax.sum;
#pragma unroll
        for (int i = 0; i < N; ++i) ranked[i] = exp_of_negative(l[i] - softmax.best) * inverse;
        break;
      }
      default:
        break;
    }
  }
  const bool biased = r.selection_bias.data != nullptr;
  if (biased) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int e = expert_of<N, grouped>(lane, i);
      if (e < rule.experts) ranked[i] = sanitised(ranked[i] + element(r.selection_bias, e));
    }
  }
  bool stays = true;
  if constexpr (grouped) {
    if (!keep_groups<N>(r, ranked, r.approximation, lane, stays)) return false;
  }
  std::int32_t keys[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool eligible = stays && expert_of<N, grouped>(lane, i) < rule.experts;
    const std::int32_t value = ordered(biased ? ranked[i] : l[i]);
    keys[i] = eligible ? ((value & ~mask) | (mask - i)) : INT32_MIN;
  }
  sort_descending(keys);
  constexpr int depth = N < 8 ? N : 8;  // of the sorted heads that a lane offers

  Slots<std::int32_t> won{{INT32_MIN, INT32_MIN}};
  bool spent = false;
  const int rounds = rule.top_k < rule.experts ? rule.top_k + 1 : rule.top_k;
  for (int s = 0; s < rounds; ++s) {
    const std::int32_t best = __reduce_max_sync(every_lane, keys[0]);
    const int owner = __ffs(__ballot_sync(every_lane, keys[0] == best)) - 1;
    if (lane == (s & 31)) {
      const int i = mask - (best & mask);
      (s < 32 ? ids.of[0] : ids.of[1]) = grouped ? owner * N + i : owner + 32 * i;
      (s < 32 ? won.of[0] : won.of[1]) = best;
    }
    if (lane == owner) {
#pragma unroll
      for (int i = 0; i + 1 < depth; ++i) keys[i] = keys[i + 1];
      keys[depth - 1] = INT32_MIN;
      if constexpr (depth < N) spent = spent || keys[0] == INT32_MIN;
    }
  }
  // Each of the k is certainly before the next.
  bool unsure = spent;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t mine = won.of[half];
    std::int32_t next = __shfl_down_sync(every_lane, mine, 1);
    if (half == 0) {
      const std::int32_t across = __shfl_sync(every_lane, won.of[1], 0);
      if (lane == 31) next = across;
    }
    const int s = lane + 32 * half;
    if (s >= rule.top_k || s + 1 >= rounds || next == INT32_MIN) continue;
    const std::int32_t a = mine & ~mask, b = next & ~mask;
    if (r.approximation > 0) {
      const auto value = [](std::int32_t o) { return float_of(o ^ ((o >> 31) & 0x7fffffff)); };
      const float room =
          2 * r.approximation + fabsf(value(b)) * (static_cast<float>(mask + 3) * 0x1p-23F);
      unsure = unsure || !(value(a) - value(b) > room);
    } else {
      unsure = unsure || (a == b && (grouped || !r.keys_are_exact));
    }
  }
  return __ballot_sync(every_lane, unsure) == 0;
}

}  // namespace shunt::routing
