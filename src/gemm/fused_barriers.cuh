// What the parts of fused_few.cuh share: its shape, its units, barriers and copies.
#pragma once

#include "gemm/fragment_warp.cuh"
#include "gemm/fused_few.hpp"

namespace shunt::cuda_engine {

namespace {

struct FusedShape {
  static constexpr int tokens = fused_tokens;
  static constexpr int multiplying = 16, finishing = fused_finishing;
  static constexpr int multiplying_from = 3;
  static constexpr int finishing_from = multiplying_from + multiplying;
  static constexpr int threads = 32 * (finishing_from + finishing);
  static constexpr int queue = 8, most_stages = most_fused_stages;
  static constexpr int token_bytes = fused_token_bytes;
  static constexpr int sum_floats = fused_sum_floats;
};

#if defined(SHUNT_SM_90A)

struct FusedUnit {
  int phase, first;  // phase 2: there are no more. The first row of weights
  int group, row, count, tile;
  int pad[2];
};

__device__ __forceinline__ void arrive_times_at(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
// As copy_bytes_once().
struct BulkCopies {
  // Rows stay in the L2.
  __device__ __forceinline__ void rows(std::uint32_t to, const char* from, int bytes,
                                       std::uint32_t barrier) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
  std::uint64_t policy;
  __device__ __forceinline__ BulkCopies() {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  __device__ __forceinline__ void expect(std::uint32_t barrier, int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void operator()(std::uint32_t to, const char* from, int bytes,
                                             std::uint32_t barrier) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
  }
};
// h is written by stores and read by bulk copies: another proxy, on either side of the counter.
__device__ __forceinline__ void fence_for_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void add_release(std::uint32_t* to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

struct FusedPlace {
  int stage = 0, round = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void go(int steps, int stages) {
    stage += steps;
    while (stage >= stages) stage -= stages, parity ^= 1, ++round;
  }
};

#endif

}  // namespace

}  // namespace shunt::cuda_engine
