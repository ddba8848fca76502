// wgmma for e4m3 operands in shared memory, m64nNk32. Only where compiled for sm_90a.
//
// A row of an operand is 128 numbers along k in 128 bytes, swizzled: wgmma_descriptor() as it is,
// 32 numbers further along k: add 2. The tensor cores add the products of an instruction to the
// sums with fewer bits than f32 has: sums of more than 128 products must leave them (promotion).
#pragma once

#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_WGMMA(n, registers, a_at, b_at, add_at, ...)                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_at                                   \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers "}, " a_at \
               ", " b_at ", add, 1, 1;\n}"                                                      \
               : __VA_ARGS__                                                                    \
               : "l"(a), "l"(b), "n"(add))

// d = a b, or with `add` d += a b.
template <int n, int add>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {
  if constexpr (n == 8) SHUNT_WGMMA("8", SHUNT_R4, "%4", "%5", "%6", SHUNT_F4(0));
  if constexpr (n == 16) SHUNT_WGMMA("16", SHUNT_R8, "%8", "%9", "%10", SHUNT_F8(0));
  if constexpr (n == 32) SHUNT_WGMMA("32", SHUNT_R16, "%16", "%17", "%18", SHUNT_F16(0));
  if constexpr (n == 64) SHUNT_WGMMA("64", SHUNT_R32, "%32", "%33", "%34", SHUNT_F32(0));
  if constexpr (n == 128) SHUNT_WGMMA("128", SHUNT_R64, "%64", "%65", "%66", SHUNT_F64(0));
}

// d = a b of 64 rows of b, or with `add` d += a b; a as mma.m16n8k32 has it, 16 rows a warp.
template <int add>
__device__ __forceinline__ void wgmma_e4m3_64(float (&d)[32], const std::uint32_t (&a)[4],
                                              std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" SHUNT_R32
      "}, {%32, %33, %34, %35}, %36, add, 1, 1;\n}"
      : SHUNT_F32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}

#undef SHUNT_WGMMA

// d = the products of one step of 128 along k.
template <int n>
__device__ __forceinline__ void step_e4m3(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {
  wgmma_e4m3<n, 0>(d, a, b);
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3<n, 1>(d, a + 2 * k, b + 2 * k);
}

// The same with 64 rows of b, and a in registers.
__device__ __forceinline__ void step_e4m3_64(float (&d)[32], const std::uint32_t (&a)[4][4],
                                             std::uint64_t b) {
  wgmma_e4m3_64<0>(d, a[0], b);
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3_64<1>(d, a[k], b + 2 * k);
}

// A bulk copy to the same place of each block of the cluster whose bit is set in `ranks`; its bytes
// count at the barrier at `barrier`'s place there.
__device__ __forceinline__ void copy_bytes_to_ranks(void* to, const void* from, unsigned bytes,
                                                    std::uint64_t* barrier, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

}  // namespace shunt::cuda_engine

#endif
