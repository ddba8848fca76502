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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "route/device.hpp"
#include "route/policy.hpp"

namespace shunt::routing {

constexpr unsigned every_lane = 0xffffffffU;
constexpr float minus_infinity = -__builtin_inff();

// What is compared, where that is compiled in.
enum class Ranked {
  logit,
  score,            // with a selection bias
  score_in_groups,  // likewise; each block of 32 experts is a group
};

__device__ __forceinline__ float float_of_ordered(std::int32_t o) {
  return float_of(o ^ ((o >> 31) & 0x7fffffff));
}

__device__ __forceinline__ float load_form(const void* data, Form form, std::int64_t i) {
  switch (form) {
    case Form::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case Form::f16:
      return __half2float(static_cast<const __half*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}
__device__ __forceinline__ float element(const DeviceVector& v, std::int64_t i) {
  return load_form(v.data, v.form, i);
}
__device__ __forceinline__ std::int64_t element(const DeviceIndices& v, std::int64_t i) {
  return v.wide ? static_cast<const std::int64_t*>(v.data)[i]
                : static_cast<const std::int32_t*>(v.data)[i];
}

// Rows of logits in memory, as a source.
struct LogitRow {
  const void* data;
  Form form;
  __device__ float operator()(std::int64_t c) const { return load_form(data, form, c); }
};

template <int N, bool grouped>
__device__ __forceinline__ int expert_of(int lane, int i) {
  return grouped ? lane * N + i : lane + 32 * i;
}

// Bias, clean, cap.
__device__ __forceinline__ float finished(const DeviceRoute& r, float raw, int column) {
  if (r.router_bias.data != nullptr) raw = raw + element(r.router_bias, column);
  float l = sanitised(raw);
  if (r.rule.soft_cap > 0) l = sanitised(soft_capped(l, r.rule.soft_cap));
  return l;
}

// ---- over a warp
// -----------------------------------------------------------------------------------

__device__ __forceinline__ float warp_max(float x) {
  return float_of([](std::int32_t o) {
    return o ^ ((o >> 31) & 0x7fffffff);
  }(__reduce_max_sync(every_lane, ordered(x))));
}

__device__ __forceinline__ std::int64_t warp_max(std::int64_t key) {
  const auto high = static_cast<std::int32_t>(key >> 32);
  const std::int32_t best = __reduce_max_sync(every_lane, high);
  const std::uint32_t low = high == best ? static_cast<std::uint32_t>(key) : 0;
  return static_cast<std::int64_t>(best) * (std::int64_t{1} << 32) +
         static_cast<std::int64_t>(__reduce_max_sync(every_lane, low));
}

// Lane i adds lane i ^ 16, i ^ 8, .. i ^ 1.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(every_lane, x, step);
  return x;
}

// What lane (and lane + 32) hold of slots 0 .. 63.
template <class T>
struct Slots {
  T of[2];
  __device__ __forceinline__ T get(int s) const {
    return __shfl_sync(every_lane, s < 32 ? of[0] : of[1], s & 31);
  }
  __device__ __forceinline__ void set(int lane, int s, T value) {
    if (lane == (s & 31)) (s < 32 ? of[0] : of[1]) = value;
  }
};

// The largest logit and the sum of exp(l - largest) over the E experts.
struct Softmax {
  float best = 0, sum = 1;
};

template <class Source>
__device__ Softmax softmax_of(const DeviceRoute& r, const Source& source, int lane) {
  Softmax s{minus_infinity, 0};
  for (int e = lane; e < r.rule.experts; e += 32) {
    s.best = larger(s.best, finished(r, source(e), e));
  }
  s.best = warp_max(s.best);
  for (int e = lane; e < r.rule.experts; e += 32) {
    s.sum += exp_of_negative(finished(r, source(e), e) - s.best);
  }
  s.sum = warp_sum(s.sum);
  return s;
}

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
  const std::uint64_t kept = r.rule.groups > 1 ? kept_groups(exact, lane) : 0;
  Slots<std::int32_t> ids{{0, 0}};
  std::int64_t last = INT64_MAX;
  for (int s = 0; s < r.rule.top_k; ++s) {
    std::int64_t best = no_key;
    for (int e = lane; e < r.rule.experts; e += 32) {
      if (r.rule.groups > 1 && (kept >> (e / r.rule.group_size) & 1) == 0) continue;
      const std::int64_t key = key_of(exact.compared(e), e);
      if (key < last && key > best) best = key;
    }
    last = warp_max(best);
    ids.set(lane, s, id_of(last));
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

// ---- weights
// -------------------------------------------------------------------------------------

// Phi-3.5: each of the k rounds has a softmax of its own over what is left.
template <class Source>
__device__ __noinline__ Slots<float> sparsemixer(const DeviceRoute& r, const Source& source,
                                                 const Slots<std::int32_t>& ids, int lane) {
  Slots<float> weights{{0, 0}};
  for (int k = 0; k < r.rule.top_k; ++k) {
    const int chosen = ids.get(k);
    const float best = finished(r, source(chosen), chosen);
    float sum = 0;
    for (int first = 0; first < r.rule.experts; first += 32) {
      const int e = first + lane;
      bool taken = e >= r.rule.experts;
      for (int j = 0; j < k; ++j) taken = ids.get(j) == e || taken;
      float term = 0;
      if (!taken) {
        const float l = finished(r, source(e), e);
        if (sparsemixer_keeps(l, best, r.rule.twice_jitter)) term = exp_of_negative(l - best);
      }
      sum += term;
    }
    weights.set(lane, k, 1.0F / warp_sum(sum));
  }
  return weights;
}

__device__ __forceinline__ float sum_of_slots(const Slots<float>& w, int count) {
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += w.get(k);
  return sum;
}

// Weights before renormalisation of the k selected.
template <class Source>
__device__ __forceinline__ Slots<float> weigh(const DeviceRoute& r, const Source& source,
                                              const Softmax& softmax,
                                              const Slots<std::int32_t>& ids, int lane) {
  const Rule& rule = r.rule;
  const Weigh kind = rule.weigh;
  if (kind == Weigh::sparsemixer) return sparsemixer(r, source, ids, lane);
  Slots<float> l{{minus_infinity, minus_infinity}};
  const int halves = rule.top_k > 32 ? 2 : 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int id = ids.of[half];
    if (half < halves && lane + 32 * half < rule.top_k && id >= 0) {
      l.of[half] = finished(r, source(id), id);
    }
  }
  Slots<float> w{{0, 0}};
  float best = 0;
  if (kind == Weigh::softmax_of_selected) best = warp_max(larger(l.of[0], l.of[1]));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half >= halves || lane + 32 * half >= rule.top_k || ids.of[half] < 0) continue;
    switch (kind) {
      case Weigh::softmax_of_all:
        w.of[half] = exp_of_negative(l.of[half] - softmax.best) / softmax.sum;
        break;
      case Weigh::softmax_of_selected:
        w.of[half] = exp_of_negative(l.of[half] - best);
        break;
      case Weigh::sigmoid:
        w.of[half] = sigmoid(l.of[half]);
        break;
      case Weigh::sqrt_softplus:
        w.of[half] = sqrt_softplus(l.of[half]);
        break;
      default:
        w.of[half] = l.of[half];
        break;
    }
  }
  if (kind == Weigh::softmax_of_selected) {
    const float sum = sum_of_slots(w, rule.top_k);
    if (ids.of[0] >= 0) w.of[0] = w.of[0] / sum;
    if (ids.of[1] >= 0) w.of[1] = w.of[1] / sum;
  }
  return w;
}

template <class Route>
__device__ __forceinline__ float final_weight(const Route& r, float w, float sum, std::int32_t id) {
  if (r.rule.renormalize) w = renormalised(w, sum, r.rule.epsilon, r.rule.epsilon_is_floor);
  w = w * r.rule.factor;
  if (r.per_expert_scale.data != nullptr) w = w * element(r.per_expert_scale, id);
  return w;
}

template <class Source>
__device__ __forceinline__ float shared_score(const DeviceRoute& r, const Source& source, int i) {
  const int column = r.rule.experts + i;
  const float l = finished(r, source(column), column);
  return r.rule.weigh == Weigh::sigmoid ? sigmoid(l) : sqrt_softplus(l);
}

// The weights of shared slots, each by the lane it belongs to; `sum` over all weighed slots.
template <class Source>
__device__ __noinline__ void store_shared(const DeviceRoute& r, const Source& source,
                                          std::int64_t t, float sum, int lane) {
  const Rule& rule = r.rule;
  for (int i = lane; i < rule.shared_count; i += 32) {
    float w = rule.shared_constant;
    if (rule.shared == Shared::sum_over_scale) w = sum / rule.scale;
    if (rule.shared == Shared::gate) {
      w = sigmoid(sanitised(r.shared_logits.data[t * r.shared_logits.stride + i]));
    }
    if (rule.shared == Shared::joint) {
      w = final_weight(r, shared_score(r, source, i), sum, rule.experts + i);
    }
    w = finite_weight(w);
    const int slot = rule.top_k + i;
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + slot] = rule.experts + i;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + slot] = w;
    if (r.dense.data != nullptr) r.dense.data[t * r.dense.stride + rule.experts + i] = w;
  }
}

// The ids of a hash table; -1 where token or entry is out of range.
__device__ inline Slots<std::int32_t> look_up(const DeviceRoute& r, std::int64_t t, int lane) {
  Slots<std::int32_t> ids{{-1, -1}};
  const std::int64_t token = element(r.token_ids, t * r.token_stride);
  if (token < 0 || token >= r.vocabulary) return ids;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = lane + 32 * half;
    if (s >= r.rule.top_k) continue;
    const std::int64_t id =
        element(r.hash_table, token * r.hash_row_stride + s * r.hash_column_stride);
    if (id >= 0 && id < r.rule.experts) ids.of[half] = static_cast<std::int32_t>(id);
  }
  return ids;
}

__device__ __noinline__ inline void store_dense(const DeviceRoute& r, std::int64_t t,
                                                const Slots<std::int32_t>& ids,
                                                const Slots<float>& w, int lane) {
  float* const row = r.dense.data + t * r.dense.stride;
  for (int e = lane; e < r.rule.experts; e += 32) row[e] = 0;
  __syncwarp();
  for (int k = 0; k < r.rule.top_k; ++k) {  // in order: a hash table may repeat an id
    const std::int32_t id = ids.get(k);
    const float weight = w.get(k);
    if (lane == 0 && id >= 0) row[id] = finite_weight(row[id] + weight);
  }
}

// A row past the valid tokens.
__device__ __noinline__ inline void clear_row(const DeviceRoute& r, std::int64_t t, int lane) {
  for (int s = lane; s < r.rule.top_k + r.rule.shared_count; s += 32) {
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + s] = -1;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + s] = 0;
    if (r.replay.data != nullptr && s < r.rule.top_k) r.replay.data[t * r.replay.stride + s] = -1;
  }
  if (r.dense.data != nullptr) {
    for (int e = lane; e < r.rule.experts + r.rule.shared_count; e += 32) {
      r.dense.data[t * r.dense.stride + e] = 0;
    }
  }
  if (r.logits_out.data != nullptr) {
    for (int c = lane; c < r.rule.columns; c += 32) {
      r.logits_out.data[t * r.logits_out.stride + c] = 0;
    }
  }
}

template <class Route>
__device__ __forceinline__ std::int64_t valid_tokens(const Route& r) {
  if (r.valid_tokens == nullptr) return r.tokens;
  const std::int64_t valid = *r.valid_tokens;
  return valid < 0 ? 0 : valid < r.tokens ? valid : r.tokens;
}

// ---- a row
// ---------------------------------------------------------------------------------------

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
      if (!select_quick<N, grouped>(r, l, softmax, lane, ids)) {
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
