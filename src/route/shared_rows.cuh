// Where every router kernel ends: complete rows of logits in shared memory become ids and weights.
#pragma once

#include "route/cuda.hpp"
#include "route/rows.cuh"

namespace shunt::routing {

// One token's logits in shared memory, as a source.
struct SharedRow {
  const float* logits;
  __device__ float operator()(std::int64_t c) const { return logits[c]; }
};

// The experts of a lane in a router: fewer choices than the gate has, so that less code is compiled
// into each kernel. More lanes' worth than needed is fine.
__host__ __device__ constexpr int shared_per_lane(int columns) {
  return columns <= 64 ? 2 : columns <= 128 ? 4 : columns <= 256 ? 8 : 16;
}

// On the host, before a launch whose kernel calls route_shared_rows. At most 512 columns.
inline void fit_shared_rows(DeviceRoute& r) {
  if (r.quick) fit_per_lane(r, shared_per_lane(r.rule.columns));
}

// A kernel's DeviceRoute in shared memory. Functions that are not inlined reach what they are given
// by address, and a parameter's own address is read like global memory, anew after every store.
class SharedRoute {
 public:
  // The whole block calls it, some barrier before get().
  __device__ __forceinline__ void fill(const DeviceRoute& r, int thread, int threads) {
    static_assert(sizeof(DeviceRoute) % 4 == 0);
    for (int i = thread; i < static_cast<int>(sizeof(DeviceRoute) / 4); i += threads) {
      words_[i] = reinterpret_cast<const std::uint32_t*>(&r)[i];
    }
  }
  // By one thread, without reading parameters at places that differ from lane to lane.
  __device__ __forceinline__ void fill(const DeviceRoute& r) {
    *reinterpret_cast<DeviceRoute*>(words_) = r;
  }
  __device__ __forceinline__ const DeviceRoute& get() const {
    return *reinterpret_cast<const DeviceRoute*>(words_);
  }

 private:
  alignas(16) std::uint32_t words_[sizeof(DeviceRoute) / 4];
};

// Not inlined: every router kernel shares these. `r`: of a SharedRoute.
template <int N, bool grouped>
__device__ __noinline__ void route_shared(const DeviceRoute& r, const float* logits, std::int64_t t,
                                          int lane) {
  float own[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = expert_of<N, grouped>(lane, i);
    own[i] = e < r.rule.experts ? logits[e] : 0.0F;
  }
  route_row<N, grouped>(r, SharedRow{logits}, own, t, lane);
}

template <int N>
__device__ __forceinline__ void route_shared(const DeviceRoute& r, const float* logits,
                                             std::int64_t t, int lane) {
  if (r.grouped) {
    route_shared<N, true>(r, logits, t, lane);
  } else {
    route_shared<N, false>(r, logits, t, lane);
  }
}

// Row i of `rows` is token first_token + i; its C raw logits begin at logits + i * stride. All
// `warps` warps call it, whole, after a barrier that orders the logits. Rows past r.tokens are
// left alone, rows past the valid count are cleared, and their logits are not read.
// `tile`: the columns that r was laid out for: 64, 128, 256 or 512, at least C.
template <int tile>
__device__ __forceinline__ void route_shared_rows(const DeviceRoute& r, const float* logits,
                                                  int stride, std::int64_t first_token, int rows,
                                                  int warp, int warps, int lane) {
  const std::int64_t valid = valid_tokens(r);
  for (int i = warp; i < rows; i += warps) {
    const std::int64_t t = first_token + i;
    if (t >= r.tokens) break;
    if (t >= valid) {
      clear_row(r, t, lane);
      continue;
    }
    route_shared<shared_per_lane(tile)>(r, logits + i * stride, t, lane);
  }
}

}  // namespace shunt::routing
