// route_shared_rows() by fast_rows.cuh where the rule allows it.
#pragma once

#include "route/fast_rows.cuh"
#include "route/shared_rows.cuh"

namespace shunt::routing {

// A warp's tokens in shared memory: rows of raw logits.
struct SharedRowsOfWarp {
  const float* logits;
  int stride;
  __device__ float operator()(int i, int e) const { return logits[i * stride + e]; }
};

// Of one warp, for any shape below.
struct alignas(16) FastSharedScratch {
  static constexpr std::size_t bytes = 4 * sizeof(FastScratch<FastShape<8, 8, 1, Ranked::logit>>);
  static_assert(2 * sizeof(FastScratch<FastShape<16, 16, 1, Ranked::logit>>) <= bytes);
  static_assert(sizeof(FastScratch<FastShape<32, 16, 1, Ranked::logit>>) <= bytes);
  unsigned char of[bytes];
};

// Not inlined: the places of a kernel that end in it share it.
template <class S>
__device__ __noinline__ void route_shared_fast(const DeviceRoute& r, const float* logits,
                                               int stride, std::int64_t first_token, int rows,
                                               int warp, int warps, FastSharedScratch* scratch,
                                               int lane) {
  const std::int64_t valid = valid_tokens(r);
  const int q = lane & (S::lanes - 1), experts = r.rule.experts;
  for (int i = warp * S::tokens; i < rows; i += warps * S::tokens) {
    const int own = i + lane / S::lanes;
    const std::int64_t t = first_token + own;
    const bool there = own < rows && t < valid;
    const float* const row = logits + (own < rows ? own : i) * stride;
    float v[S::held];
    if (experts % S::run == 0) {
      struct alignas(4 * S::run) Run {
        float of[S::run];
      };
#pragma unroll
      for (int b = 0; b < S::blocks; ++b) {
        const Run run =
            *reinterpret_cast<const Run*>(row + S::run_within(32 * b + q * S::run, experts));
#pragma unroll
        for (int j = 0; j < S::run; ++j) v[b * S::run + j] = run.of[j];
      }
    } else {
#pragma unroll
      for (int n = 0; n < S::held; ++n) v[n] = row[min(S::expert(n, q), experts - 1)];
    }
    route_fast<S>(r, r, SharedRowsOfWarp{logits + i * stride, stride}, v,
                  reinterpret_cast<FastScratch<S>*>(scratch[warp].of), t, there, lane);
    if (first_token + i + S::tokens <= valid) continue;
    for (int token = i; token < rows && token < i + S::tokens; ++token) {
      if (first_token + token >= valid && first_token + token < r.tokens) {
        clear_row(r, first_token + token, lane);
      }
    }
  }
}

// As route_shared_rows(); returns false, and does nothing, where the rule is not one of those. Rows
// begin at multiples of 16 bytes. `most`: the columns that the kernel is compiled for: 64, 128, 256
// or 512, at least C. `few`: about a row a warp, which 32 lanes take; else as many lanes as hold
// the experts, since a block has few warps and its rows would wait for each other. `scratch`: one
// for each warp, in shared memory.
template <int most, bool few>
__device__ __forceinline__ bool route_shared_rows_fast(const DeviceRoute& r, const float* logits,
                                                       int stride, std::int64_t first_token,
                                                       int rows, int warp, int warps,
                                                       FastSharedScratch* scratch, int lane) {
  const auto go = [&]<int lanes, int best, int blocks, Ranked ranked>() {
    route_shared_fast<FastShape<lanes, best, blocks, ranked>>(r, logits, stride, first_token, rows,
                                                              warp, warps, scratch, lane);
    return true;
  };
  const auto with = [&]<int lanes, int best, int blocks>() {
    if (r.fast.in_groups) {
      if constexpr (blocks == 8) {  // each block of 32 experts is a group
        return go.template operator()<lanes, best, blocks, Ranked::score_in_groups>();
      }
      return false;
    }
    if (r.fast.scored) return go.template operator()<lanes, best, blocks, Ranked::score>();
    return go.template operator()<lanes, best, blocks, Ranked::logit>();
  };
  if (r.fast.lanes == 0) return false;
  const bool best_8 = r.fast.best <= 8;
  if constexpr (few) {
    if constexpr (most == 512) {
      if (best_8 && r.fast.blocks <= 8) return with.template operator()<32, 8, 8>();
    }
    return best_8 ? with.template operator()<32, 8, most / 32>()
                  : with.template operator()<32, 16, most / 32>();
  } else {
    return best_8 ? with.template operator()<(most == 512 ? 16 : 8), 8, most / 32>()
                  : with.template operator()<16, 16, most / 32>();
  }
}

// Rows past the valid tokens.
__device__ __forceinline__ void clear_rows(const DeviceRoute& r, std::int64_t first_token, int rows,
                                           int warp, int warps, int lane) {
  for (int i = warp; i < rows && first_token + i < r.tokens; i += warps) {
    clear_row(r, first_token + i, lane);
  }
}

}  // namespace shunt::routing
