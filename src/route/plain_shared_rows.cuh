// Where a router ends whose rule is plain (plain_rows.cuh): rows of logits in shared memory.
#pragma once

#include "route/plain_rows.cuh"
#include "route/shared_rows.cuh"

namespace shunt::routing {

// Room for the ids of a warp's tokens.
struct PlainScratch {
  std::int32_t won[4][8];
};

// Row i of `rows` is token first_token + i, its raw logits at whole + i * stride. load(i, q, v)
// fills v with what lane q of row i holds, and leaves it in the row, too. All `warps` warps call
// it, whole. Rows past r.tokens are left alone, rows past the valid count are cleared.
template <class S, class Load>
__device__ __forceinline__ void route_shared_rows_plain(const DeviceRoute& r, const Load& load,
                                                        const float* whole, int stride,
                                                        std::int64_t first_token, int rows,
                                                        int warp, int warps, PlainScratch& scratch,
                                                        int lane) {
  static_assert(S::tokens <= 4 && S::best <= 8);
  constexpr std::uint32_t of_token = S::lanes == 32 ? every_lane : (1U << (S::lanes & 31)) - 1;
  const std::int64_t valid = valid_tokens(r);
  const int q = lane & (S::lanes - 1), token = lane / S::lanes;
  for (int i = warp * S::tokens; i < rows; i += warps * S::tokens) {
    const int own = min(i + token, rows - 1);
    const std::int64_t t = first_token + own;
    const bool there = own == i + token && t < valid;
    float v[S::held];
    load(own, q, v);
    const std::uint32_t left =
        route_plain<S>(r, whole + own * stride, v, scratch.won[token], t, there, lane);
    if (left == 0 && first_token + i + S::tokens <= valid) continue;
    __syncwarp();
    for (int n = 0; n < S::tokens && i + n < rows; ++n) {
      if (first_token + i + n >= r.tokens) break;
      if (first_token + i + n >= valid) {
        clear_row(r, first_token + i + n, lane);
      } else if ((left >> (n * S::lanes) & of_token) != 0) {
        route_in_rounds(r, whole + (i + n) * stride, first_token + i + n, lane);
      }
    }
  }
}

// The same with a row a warp, for rows that are complete, of at most `most` columns. Returns false,
// and does nothing, where the rule is not plain.
template <int most>
__device__ __forceinline__ bool route_few_rows_plain(const DeviceRoute& r, const float* whole,
                                                     int stride, std::int64_t first_token, int rows,
                                                     int warp, int warps, PlainScratch& scratch,
                                                     int lane) {
  const int experts = r.rule.experts;
  const auto go = [&]<int blocks, int best>() {
    using S = FastShape<32, best, blocks, Ranked::logit>;
    route_shared_rows_plain<S>(
        r,
        [&](int row, int q, float(&v)[S::held]) {
#pragma unroll
          for (int n = 0; n < S::held; ++n) {
            v[n] = whole[row * stride + min(S::expert(n, q), experts - 1)];
          }
        },
        whole, stride, first_token, rows, warp, warps, scratch, lane);
    return true;
  };
  const auto with = [&]<int blocks>() {
    return r.plain_best == 4 ? go.template operator()<blocks, 4>()
                             : go.template operator()<blocks, 8>();
  };
  if (r.plain_best == 0) return false;
  if constexpr (most > 256) {
    if (experts <= 32) return with.template operator()<1>();
    return experts <= 256 ? with.template operator()<8>() : with.template operator()<16>();
  } else {
    return with.template operator()<most / 32>();
  }
}

}  // namespace shunt::routing
