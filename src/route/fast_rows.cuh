// From the logits of several tokens to their ids and weights, by one warp: `lanes` lanes a token.
// For the rules that serve models most (fast_plan()); rows.cuh does all others, with the same
// bits.
//
// Lane q of a token holds the experts 32 i + V q + j, i < blocks, j < V = 32 / lanes
// (plain_rows.cuh may have blocks of 16).
//   1. Logits are cleaned; scored, approximately, where scores rank; the bias added; groups that do
//      not stay are dropped.
//   2. The largest of each of 4 P buckets of experts; lanes merge their sorted lists of these
//      pairwise. The k-th largest bucket, less what the approximation may be off, is a threshold
//      that at least the k best reach: each of k buckets holds one.
//   3. Experts that reach it are candidates: k, about one more since two may share a bucket, and
//      those that tie. Their ids go to shared memory; a lane takes one or two, computes the value
//      exactly and counts the candidates that come before it by (value, id). That is its slot.
//   4. Lane s holds slot s: weights, their sum from slot 0 on, outputs.
// Where groups are too close to tell, the whole warp ranks them exactly; where there are more
// candidates than room, it selects once more, in k rounds. Nothing is synchronised but the warp.
//
// Warp instructions for 4 tokens, 8 lanes a token and P = 8, as ncu counted them: 128 experts,
// softmax: 990; 256 experts in 8 groups, sigmoid: 1460. min and max issue every other cycle.
#pragma once

#include "route/rows.cuh"
#include "route/sorting.cuh"
#include "route/weights.cuh"

namespace shunt::routing {

template <int lanes_, int best_, int blocks_, Ranked ranked_, int width_ = 32>
struct FastShape {
  static constexpr int lanes = lanes_;    // of a token
  static constexpr int best = best_;      // P: k or more
  static constexpr int blocks = blocks_;  // of `width` experts
  static constexpr int width = width_;
  static constexpr Ranked ranked = ranked_;
  static constexpr int tokens = 32 / lanes;         // of a warp
  static constexpr int run = width / lanes;         // V
  static constexpr int held = run * blocks;         // experts of a lane
  static constexpr int share = lanes < 32 ? 2 : 1;  // candidates of a lane
  static constexpr int room = share * lanes;        // candidates of a token
  static constexpr int slots = best < 4 ? 4 : best;
  static constexpr int most_buckets = 4 * best < lanes ? 1 : 4 * best / lanes;
  static constexpr int buckets = held < most_buckets ? held : most_buckets;  // of a lane
  static_assert(held <= 64);

  // The n-th expert of lane q.
  __device__ static __forceinline__ int expert(int n, int q) {
    const auto index = static_cast<unsigned>(n);
    return static_cast<int>(index / run * width + index % run) + q * run;
  }
  // Where to read a run that begins at `first`: no run ends past E, which is a multiple of the run.
  // Routers are compiled for more blocks than a small E has.
  __device__ static __forceinline__ int run_within(int first, int experts) {
    return min(first, experts - run);
  }
  // Of Kept::of_token, where each block is a group.
  __device__ static __forceinline__ bool stays(std::uint32_t kept, int group) {
    return (kept >> (group * (lanes / blocks)) & 1) != 0;
  }
};

// A token's, in shared memory. 8 lanes: 72 words, so that 4 tokens lie in different banks.
template <class S>
struct alignas(16) FastScratch {
  float weights[S::slots];
  int2 won[S::slots];  // id, and the bits of the score or the logit
  std::int64_t keys[S::room];
  std::int32_t ids[S::room];
};

// ---- thresholds --------------------------------------------------------------------------------

struct Threshold {
  float kth, first;
};

// `list`: sorted, of this lane and those that it has merged with. The k-th and the first of all.
template <class S, int step, int have>
__device__ __forceinline__ Threshold merge_lists(const float (&list)[have], int k) {
  Threshold t{list[0], list[0]};
  if constexpr (step == S::lanes) {
#pragma unroll
    for (int i = 1; i < have; ++i) t.kth = i == k - 1 ? list[i] : t.kth;
    return t;
  } else if constexpr (have < S::best) {
    float both[2 * have];
#pragma unroll
    for (int i = 0; i < have; ++i) {
      both[i] = list[i];
      both[2 * have - 1 - i] = __shfl_xor_sync(every_lane, list[i], step);
    }
    sort_bitonic_keys(both);
    return merge_lists<S, 2 * step>(both, k);
  } else {
    float both[have];
#pragma unroll
    for (int i = 0; i < have; ++i) {
      both[i] = fmaxf(list[i], __shfl_xor_sync(every_lane, list[have - 1 - i], step));
    }
    if (2 * step == S::lanes && k == have) {  // any order will do
      t = {both[0], both[0]};
#pragma unroll
      for (int i = 1; i < have; ++i) {
        t.kth = fminf(t.kth, both[i]);
        t.first = fmaxf(t.first, both[i]);
      }
      return t;
    }
    sort_bitonic_keys(both);
    return merge_lists<S, 2 * step>(both, k);
  }
}

// `tops`: the largest of each part of the lane's experts.
template <class S, int count>
__device__ __forceinline__ Threshold threshold_of(const float (&tops)[count], int k) {
  float list[S::buckets];
#pragma unroll
  for (int b = 0; b < S::buckets; ++b) {
    list[b] = tops[b];
#pragma unroll
    for (int i = b + S::buckets; i < count; i += S::buckets) list[b] = fmaxf(list[b], tops[i]);
  }
  sort_keys(list);
  return merge_lists<S, 1>(list, k);
}

// ---- scores ------------------------------------------------------------------------------------

// NaN and -inf become -FLT_MAX. -0 stays, and compares like 0; +inf stays, and the threshold is
// never above FLT_MAX, which it ties with.
__device__ __forceinline__ float bounded_below(float x) { return fmaxf(x, -largest); }

// sqrt_softplus within 6e-4: log(1 + e) is within 3e-7, of which this is the root at worst.
__device__ __forceinline__ float sqrt_softplus_about(float l) {
  const float log2 = log2_about(1.0F + exp2_about(fabsf(l) * -0x1.715476p+0F));
  return sqrt_about(fused(log2, 0x1.62e43p-1F, fminf(fmaxf(l, 0.0F), largest)));
}

// The sum of exp(l - best) over a token's experts in policy.hpp's order of sums. -inf past E.
template <class S>
__device__ __forceinline__ float sum_of_exponentials(const float (&l)[S::held], float best) {
  float lowest = l[0];
#pragma unroll
  for (int i = 1; i < S::held; ++i) lowest = fminf(lowest, l[i]);
  float sums[S::run];
  if (__all_sync(every_lane, lowest - best > -86.0F)) [[likely]] {
#pragma unroll
    for (int j = 0; j < S::run; ++j) {
      sums[j] = exp_of_small_negative(l[j] - best);
#pragma unroll
      for (int i = 1; i < S::blocks; ++i) {
        sums[j] += exp_of_small_negative(l[i * S::run + j] - best);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < S::run; ++j) {
      sums[j] = 0;
#pragma unroll
      for (int i = 0; i < S::blocks; ++i) sums[j] += exp_of_negative(l[i * S::run + j] - best);
    }
  }
#pragma unroll
  for (int step = S::lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < S::run; ++j) sums[j] += __shfl_xor_sync(every_lane, sums[j], step);
  }
#pragma unroll
  for (int step = S::run / 2; step > 0; step /= 2) {
#pragma unroll
    for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
  }
  return sums[0];
}

template <class S, class T>
__device__ __forceinline__ void add(const T* bias, int experts, int q, float (&v)[S::held]) {
#pragma unroll
  for (int n = 0; n < S::held; ++n) {
    v[n] = v[n] + static_cast<float>(bias[min(S::expert(n, q), experts - 1)]);
  }
}
template <class S>
__device__ __forceinline__ void add_router_bias(const DeviceVector& bias, int experts, int q,
                                                float (&v)[S::held]) {
  switch (bias.form) {
    case Form::bf16:
      return add<S>(static_cast<const __nv_bfloat16*>(bias.data), experts, q, v);
    case Form::f16:
      return add<S>(static_cast<const __half*>(bias.data), experts, q, v);
    default:
      return add<S>(static_cast<const float*>(bias.data), experts, q, v);
  }
}

template <class S>
__device__ __forceinline__ void load_bias(const float* bias, int experts, int q,
                                          float (&b)[S::held]) {
  struct alignas(S::run < 4 ? 4 * S::run : 16) Run {
    float of[S::run];
  };
  if (experts % S::run == 0 && reinterpret_cast<std::uintptr_t>(bias) % sizeof(Run) == 0)
      [[likely]] {
#pragma unroll
    for (int i = 0; i < S::blocks; ++i) {
      const Run run =
          *reinterpret_cast<const Run*>(bias + S::run_within(32 * i + q * S::run, experts));
#pragma unroll
      for (int j = 0; j < S::run; ++j) b[i * S::run + j] = run.of[j];
    }
  } else {
#pragma unroll
    for (int n = 0; n < S::held; ++n) b[n] = bias[min(S::expert(n, q), experts - 1)];
  }
}

// Exactly what ranks an expert of raw logit `l`, and what its weight is made of. `softmax`: of the
// token, where shares rank.
template <class S>
__device__ __forceinline__ float exact_value(const DeviceRoute& r, float l, std::int32_t id,
                                             float& kept, const Softmax& softmax) {
  if (r.router_bias.data != nullptr) [[unlikely]]
    l = l + element(r.router_bias, id);
  l = sanitised(l);
  kept = l;
  if (r.rule.weigh == Weigh::sigmoid) kept = sigmoid(l);
  if (r.rule.weigh == Weigh::sqrt_softplus) kept = sqrt_softplus(l);
  if constexpr (S::ranked == Ranked::share) kept = exp_of_negative(l - softmax.best) / softmax.sum;
  if constexpr (S::ranked == Ranked::logit) return l;
  const float value = r.rule.scores_rank ? kept : l;
  return sanitised(value + static_cast<const float*>(r.selection_bias.data)[id]);
}

struct Kept {
  std::uint32_t of_token;  // bit g * (lanes / groups): group g stays
  bool certain;
};

// first, second: the two best of the lane's experts of each group; spoilt. `off`: what a value may
// be off.
template <class S>
__device__ __forceinline__ Kept keep_groups(const Rule& rule, float (&first)[S::blocks],
                                            float (&second)[S::blocks], float off, int lane) {
  constexpr int groups = S::blocks;
  static_assert(groups <= S::lanes);
  // Each exchange halves what a lane answers for, until it is one group.
#pragma unroll
  for (int step = S::lanes / 2, width = groups; step > 0; step /= 2) {
    const int half = width > 1 ? width / 2 : 1;
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (g >= half) continue;
      float mine = first[g], mine_second = second[g], theirs = first[g], theirs_second = second[g];
      if (width > 1) {
        mine = upper ? first[(g + half) % groups] : first[g];
        theirs = upper ? first[g] : first[(g + half) % groups];
        mine_second = upper ? second[(g + half) % groups] : second[g];
        theirs_second = upper ? second[g] : second[(g + half) % groups];
      }
      const float other = __shfl_xor_sync(every_lane, theirs, step);
      const float other_second = __shfl_xor_sync(every_lane, theirs_second, step);
      second[g] = fmaxf(fmaxf(mine_second, other_second), fminf(mine, other));
      first[g] = fmaxf(mine, other);
    }
    width = half;
  }
  constexpr int each = S::lanes / groups;  // lanes that answer for a group
  const int base = lane & ~(S::lanes - 1);
  const float rank = rule.rank_by_two_best ? first[0] + second[0] : first[0];
  const float margin = 4 * off + 5e-7F * fabsf(rank);
  const float above = rank + margin, below = rank - margin;
  int surely = 0, perhaps = -1;  // groups that are better; itself is one that perhaps is
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    const float other = __shfl_sync(every_lane, rank, base + g * each);
    surely += other > above ? 1 : 0;
    perhaps += other < below ? 0 : 1;
  }
  const bool stays = perhaps < rule.keep;
  const std::uint32_t unsure = __ballot_sync(every_lane, !stays && surely < rule.keep) >> base;
  const std::uint32_t kept = __ballot_sync(every_lane, stays) >> base;
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
  return {kept, (unsure & of_token) == 0};
}

// ---- exact selection ---------------------------------------------------------------------------

// Kept::of_token of a token, by the whole warp, each block of 32 experts a group.
template <class S, class Source>
__device__ __noinline__ std::uint32_t keep_groups_exactly(const DeviceRoute& r, Source source,
                                                          int token, int lane) {
  const Rule& rule = r.rule;
  float rank = minus_infinity;  // of group `lane`
#pragma unroll
  for (int g = 0; g < S::blocks; ++g) {
    const int e = lane + 32 * g;
    float kept = 0;
    const std::int32_t value = ordered(exact_value<S>(r, source(token, e), e, kept, {}));
    const std::int32_t first = __reduce_max_sync(every_lane, value);
    const int owner = __ffs(static_cast<int>(__ballot_sync(every_lane, value == first))) - 1;
    const std::int32_t second = __reduce_max_sync(every_lane, lane == owner ? INT32_MIN : value);
    const float two = float_of_ordered(first) + float_of_ordered(second);
    if (lane == g) rank = rule.rank_by_two_best ? two : float_of_ordered(first);
  }
  int better = 0;
#pragma unroll
  for (int g = 0; g < S::blocks; ++g) {
    const float other = __shfl_sync(every_lane, rank, g);
    better += other > rank || (other == rank && g < lane) ? 1 : 0;
  }
  const std::uint32_t stay = __ballot_sync(every_lane, lane < S::blocks && better < rule.keep);
  std::uint32_t kept = 0;
#pragma unroll
  for (int g = 0; g < S::blocks; ++g) kept |= (stay >> g & 1) << (g * (S::lanes / S::blocks));
  return kept;
}

// The k best of a token, by the whole warp, into scratch.won. Rare: short rather than fast.
template <class S, class Source>
__device__ __noinline__ void select_slowly(const DeviceRoute& r, Source source, int token,
                                           std::uint32_t kept_groups, Softmax softmax,
                                           FastScratch<S>& scratch, int lane) {
  const Rule& rule = r.rule;
  std::int32_t values[S::blocks];
#pragma unroll 1
  for (int i = 0; i < S::blocks; ++i) {
    const int e = lane + 32 * i;
    bool eligible = e < rule.experts;
    if constexpr (S::ranked == Ranked::score_in_groups) eligible = S::stays(kept_groups, i);
    float kept = 0;
    values[i] = INT32_MIN;
    if (eligible) values[i] = ordered(exact_value<S>(r, source(token, e), e, kept, softmax));
  }
  std::int32_t last = INT32_MAX, last_id = -1;
  for (int s = 0; s < rule.top_k; ++s) {
    std::int32_t best = INT32_MIN, best_id = INT32_MAX;
#pragma unroll 1
    for (int i = 0; i < S::blocks; ++i) {
      const int e = lane + 32 * i;
      const bool open = values[i] < last || (values[i] == last && e > last_id);
      if (open && values[i] > best) {
        best = values[i];
        best_id = e;
      }
    }
    last = __reduce_max_sync(every_lane, best);
    last_id = __reduce_min_sync(every_lane, best == last ? best_id : INT32_MAX);
    if (lane == 0) {
      float kept = 0;
      exact_value<S>(r, source(token, last_id), last_id, kept, softmax);
      scratch.won[s] = make_int2(last_id, bits_of(kept));
    }
  }
}

// ---- rows --------------------------------------------------------------------------------------

// All 32 lanes call it together; `t` and `there` are those of the lane's token. `whole`: `r` in
// memory, for functions that are not inlined; `r` itself may have fields that are known when this
// is compiled. `v`: the raw logits of the lane's experts, anything past E; spoilt. source(i, e):
// the raw logit of expert e of the warp's token i again. `of_warp`: a scratch for each token of the
// warp.
template <class S, class Source>
__device__ __forceinline__ void route_fast(const DeviceRoute& r, const DeviceRoute& whole,
                                           const Source source, float (&v)[S::held],
                                           FastScratch<S>* of_warp, std::int64_t t, bool there,
                                           int lane) {
  static_assert(S::held <= 32 && S::best <= S::lanes && S::width == 32);
  const Rule& rule = r.rule;
  const int token = lane / S::lanes;
  FastScratch<S>& scratch = of_warp[token];
  const int q = lane & (S::lanes - 1);
  const int experts = rule.experts;
  // On its way while logits are, where registers hold both.
  constexpr bool early = S::ranked != Ranked::logit && S::held <= 8;
  float bias[early ? S::held : 1];
  if constexpr (early) {
    load_bias<S>(static_cast<const float*>(r.selection_bias.data), experts, q, bias);
  }
  if (r.router_bias.data != nullptr) [[unlikely]]
    add_router_bias<S>(r.router_bias, experts, q, v);
#pragma unroll
  for (int n = 0; n < S::held; ++n) v[n] = bounded_below(v[n]);
  Softmax softmax;
  if constexpr (S::ranked == Ranked::share) {
#pragma unroll
    for (int n = 0; n < S::held; ++n) {
      v[n] = S::expert(n, q) < experts ? fminf(v[n], largest) : minus_infinity;
    }
    softmax.best = v[0];
#pragma unroll
    for (int n = 1; n < S::held; ++n) softmax.best = fmaxf(softmax.best, v[n]);
#pragma unroll
    for (int step = 1; step < S::lanes; step *= 2) {
      softmax.best = fmaxf(softmax.best, __shfl_xor_sync(every_lane, softmax.best, step));
    }
    softmax.best = sanitised(softmax.best);
    softmax.sum = sum_of_exponentials<S>(v, softmax.best);
    const float inverse = 1.0F / softmax.sum;
#pragma unroll
    for (int n = 0; n < S::held; ++n) v[n] = exp_of_negative(v[n] - softmax.best) * inverse;
  }
  if constexpr (S::ranked != Ranked::logit) {
    if (S::ranked != Ranked::share && rule.scores_rank) {
      if (rule.weigh == Weigh::sigmoid) {
#pragma unroll
        for (int n = 0; n < S::held; ++n) v[n] = sigmoid_about(v[n]);
      } else {
#pragma unroll
        for (int n = 0; n < S::held; ++n) v[n] = sqrt_softplus_about(v[n]);
      }
    }
    if constexpr (early) {
#pragma unroll
      for (int n = 0; n < S::held; ++n) v[n] = bounded_below(v[n] + bias[n]);
    } else {
      float late[S::held];
      load_bias<S>(static_cast<const float*>(r.selection_bias.data), experts, q, late);
#pragma unroll
      for (int n = 0; n < S::held; ++n) v[n] = bounded_below(v[n] + late[n]);
    }
  }
  if (experts < 32 * S::blocks) [[unlikely]] {
#pragma unroll
    for (int n = 0; n < S::held; ++n) v[n] = S::expert(n, q) < experts ? v[n] : minus_infinity;
  }
  const bool near = S::ranked == Ranked::share || rule.weigh == Weigh::sigmoid;
  const float off = !rule.scores_rank ? 0.0F : near ? 4e-7F : 6e-4F;
  Threshold threshold;
  std::uint32_t kept_groups = 0;
  if constexpr (S::ranked == Ranked::score_in_groups) {
    float first[S::blocks], second[S::blocks], tops[S::blocks];
#pragma unroll
    for (int g = 0; g < S::blocks; ++g) {
      first[g] = v[g * S::run];
      second[g] = minus_infinity;
#pragma unroll
      for (int j = 1; j < S::run; ++j) {
        second[g] = fmaxf(second[g], fminf(first[g], v[g * S::run + j]));
        first[g] = fmaxf(first[g], v[g * S::run + j]);
      }
      tops[g] = first[g];
    }
    const Kept kept = keep_groups<S>(rule, first, second, off, lane);
    kept_groups = kept.of_token;
    const std::uint32_t unsure = __ballot_sync(every_lane, !kept.certain && there);
    if (unsure != 0) [[unlikely]] {
      for (int i = 0; i < S::tokens; ++i) {
        if ((unsure >> (i * S::lanes) & 1) == 0) continue;
        const std::uint32_t exact = keep_groups_exactly<S>(whole, source, i, lane);
        if (i == token) kept_groups = exact;
      }
    }
#pragma unroll
    for (int g = 0; g < S::blocks; ++g) {
      tops[g] = S::stays(kept_groups, g) ? tops[g] : minus_infinity;
    }
    threshold = threshold_of<S>(tops, rule.top_k);
  } else {
    threshold = threshold_of<S>(v, rule.top_k);
  }
  float sum_of_all = 1;
  if constexpr (S::ranked == Ranked::logit) {
    if (rule.weigh == Weigh::softmax_of_all) {
      if (__any_sync(every_lane, threshold.first > largest)) [[unlikely]] {
#pragma unroll
        for (int n = 0; n < S::held; ++n) v[n] = fminf(v[n], largest);
        threshold.first = fminf(threshold.first, largest);
      }
      sum_of_all = sum_of_exponentials<S>(v, threshold.first);
    }
  }
  float least = fminf(threshold.kth, largest);
  if constexpr (S::ranked != Ranked::logit) {
    least = fmaxf(least - (2 * off + fabsf(least) * 0x1p-20F), -largest);
  }
  least = least == 0 ? -0.0F : least;  // -0 - -0 is 0, but -0 - 0 is -0
  // A bit for each that reaches it: the sign of the difference, from the last on.
  std::uint32_t below = 0;
#pragma unroll
  for (int g = S::blocks - 1; g >= 0; --g) {
    float of_group = least;
    if constexpr (S::ranked == Ranked::score_in_groups) {
      of_group = S::stays(kept_groups, g) ? least : -minus_infinity;
    }
#pragma unroll
    for (int j = S::run - 1; j >= 0; --j) {
      const auto sign = static_cast<std::uint32_t>(bits_of(v[g * S::run + j] - of_group));
      below = __funnelshift_l(sign, below, 1);
    }
  }
  constexpr std::uint32_t all_held = S::held == 32 ? every_lane : (1U << (S::held & 31)) - 1;
  std::uint32_t mine = ~below & all_held;
  const int own = __popc(mine);
  int before = own;
#pragma unroll
  for (int step = 1; step < S::lanes; step *= 2) {
    const int lower = __shfl_up_sync(every_lane, before, step, S::lanes);
    before += q >= step ? lower : 0;
  }
  const int candidates = __shfl_sync(every_lane, before, S::lanes - 1, S::lanes);
  before -= own;
  const bool certain = candidates <= S::room;
  if (!certain || !there) mine = 0;
#pragma unroll 1
  while (mine != 0) {
    const int n = __ffs(static_cast<int>(mine)) - 1;
    mine &= mine - 1;
    scratch.ids[before++] = S::expert(n, q);
  }
  __syncwarp();

  const int count = certain && there ? candidates : 0;
  std::int64_t key[S::share];
  std::int32_t id[S::share] = {};
  float kept[S::share] = {};
#pragma unroll
  for (int u = 0; u < S::share; ++u) {
    const int c = q + u * S::lanes;
    key[u] = no_key;
    if (c < count) {
      id[u] = scratch.ids[c];
      const float value = exact_value<S>(r, source(token, id[u]), id[u], kept[u], softmax);
      bool stays = true;  // inf - inf, too, reaches a threshold
      if constexpr (S::ranked == Ranked::score_in_groups) {
        stays = S::stays(kept_groups, id[u] / 32);
      }
      if (stays) key[u] = key_of(value, id[u]);
    }
    scratch.keys[c] = key[u];
  }
  __syncwarp();
  int place[S::share] = {};
  const auto compare = [&](std::int64_t other) {
#pragma unroll
    for (int u = 0; u < S::share; ++u) place[u] += other > key[u] ? 1 : 0;
  };
#pragma unroll
  for (int c = 0; c < S::best; ++c) compare(scratch.keys[c]);
#pragma unroll 1
  for (int c = S::best; c < count; ++c) compare(scratch.keys[c]);
#pragma unroll
  for (int u = 0; u < S::share; ++u) {
    if (q + u * S::lanes < count && place[u] < rule.top_k) {
      scratch.won[place[u]] = make_int2(id[u], bits_of(kept[u]));
    }
  }
  const std::uint32_t uncertain = __ballot_sync(every_lane, !certain && there);
  if (uncertain != 0) [[unlikely]] {
    for (int i = 0; i < S::tokens; ++i) {
      if ((uncertain >> (i * S::lanes) & 1) != 0) {
        const std::uint32_t groups = __shfl_sync(every_lane, kept_groups, i * S::lanes);
        Softmax of_token;
        if constexpr (S::ranked == Ranked::share) {
          of_token = {__shfl_sync(every_lane, softmax.best, i * S::lanes),
                      __shfl_sync(every_lane, softmax.sum, i * S::lanes)};
        }
        select_slowly<S>(whole, source, i, groups, of_token, of_warp[i], lane);
      }
    }
  }
  __syncwarp();

  const bool has = q < rule.top_k && there;
  const int2 won = has ? scratch.won[q] : make_int2(0, 0);
  const auto sum_of = [&](float w) {  // from slot 0 on; slots past k add 0
    if (q < S::slots) scratch.weights[q] = has ? w : 0.0F;
    __syncwarp();
    float sum = 0;
#pragma unroll
    for (int s = 0; s < S::slots; s += 4) {
      const float4 of = *reinterpret_cast<const float4*>(scratch.weights + s);
      sum += of.x;
      sum += of.y;
      sum += of.z;
      sum += of.w;
    }
    __syncwarp();
    return sum;
  };
  float w = float_of(won.y);
  if (S::ranked == Ranked::share) {
    // It is one.
  } else if (rule.weigh == Weigh::softmax_of_all) {
    w = exp_of_negative(w - sanitised(threshold.first)) / sum_of_all;
  } else if (rule.weigh == Weigh::softmax_of_selected) {
    float best = has ? w : minus_infinity;
    if constexpr (S::ranked == Ranked::logit) {
      best = __shfl_sync(every_lane, best, 0, S::lanes);
    } else {  // a bias may have put another first
#pragma unroll
      for (int step = 1; step < S::lanes; step *= 2) {
        best = fmaxf(best, __shfl_xor_sync(every_lane, best, step));
      }
    }
    w = exp_of_negative(w - best);
    w = w / sum_of(w);
  }
  const float sum = rule.renormalize ? sum_of(w) : 0.0F;
  if (has) {
    w = finite_weight(final_weight(r, w, sum, won.x));
    if (r.ids.data != nullptr) r.ids.data[t * r.ids.stride + q] = won.x;
    if (r.weights.data != nullptr) r.weights.data[t * r.weights.stride + q] = w;
    if (r.replay.data != nullptr) {
      r.replay.data[t * r.replay.stride + q] = static_cast<std::int16_t>(won.x);
    }
  }
}

}  // namespace shunt::routing
