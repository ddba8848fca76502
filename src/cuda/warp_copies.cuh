// Bulk copies that a whole warp orders, from values that are the same in all its lanes: one lane
// does it under a predicate. With a branch by lanes instead, the compiler keeps a loop's values a
// lane each, and moves them to the uniform registers that the instructions read: a warp that has
// given its registers away (24 are left) then spills some at each step.
#pragma once

#include "cuda/hopper.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// The compiler sees: the same in all lanes.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// As mbarrier_arrive(), mbarrier_arrive_expect(), copy_bytes(), copy_box() and copy_box_to_ranks(),
// by lanes that are `on`; shared memory by its addresses.
__device__ __forceinline__ void arrive_if(bool on, std::uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.u32 on, %1, 0;\n"
      "@on mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<unsigned>(on))
      : "memory");
}
__device__ __forceinline__ void arrive_expect_if(bool on, std::uint32_t barrier, unsigned bytes) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.u32 on, %2, 0;\n"
      "@on mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes), "r"(static_cast<unsigned>(on))
      : "memory");
}
__device__ __forceinline__ void copy_bytes_if(bool on, std::uint32_t to, const void* from,
                                              unsigned bytes, std::uint32_t barrier,
                                              std::uint64_t policy) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.u32 on, %5, 0;\n"
      "@on cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy), "r"(static_cast<unsigned>(on))
      : "memory");
}
__device__ __forceinline__ void copy_box_if(bool on, std::uint32_t to, const void* map,
                                            std::uint32_t barrier, int column, int row) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.u32 on, %5, 0;\n"
      "@on cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];\n}" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(static_cast<unsigned>(on))
      : "memory");
}
__device__ __forceinline__ void copy_box_to_ranks_if(bool on, std::uint32_t to, const void* map,
                                                     std::uint32_t barrier, int column, int row,
                                                     std::uint16_t ranks) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.u32 on, %6, 0;\n"
      "@on cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;\n}" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(ranks), "r"(static_cast<unsigned>(on))
      : "memory");
}

}  // namespace shunt::cuda_engine

#endif
