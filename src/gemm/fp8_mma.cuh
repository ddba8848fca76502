// wgmma for e4m3 operands in shared memory, m64nNk32. Only where compiled for sm_90a.
//
// A row of an operand is 128 numbers along k in 128 bytes, swizzled: wgmma_descriptor() as it is,
// 32 numbers further along k: add 2. The tensor cores add the products of an instruction to the
// sums with fewer bits than f32 has: sums of more than 128 products must leave them (promotion).
#pragma once

#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_R4 "%0, %1, %2, %3"
#define SHUNT_R8 SHUNT_R4 ", %4, %5, %6, %7"
#define SHUNT_R16 SHUNT_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SHUNT_R32 \
  SHUNT_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SHUNT_R64                                                                           \
  SHUNT_R32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SHUNT_F4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SHUNT_F8(i) SHUNT_F4(i), SHUNT_F4((i) + 4)
#define SHUNT_F16(i) SHUNT_F8(i), SHUNT_F8((i) + 8)
#define SHUNT_F32(i) SHUNT_F16(i), SHUNT_F16((i) + 16)
#define SHUNT_F64(i) SHUNT_F32(i), SHUNT_F32((i) + 32)
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

#undef SHUNT_WGMMA
#undef SHUNT_F64
#undef SHUNT_F32
#undef SHUNT_F16
#undef SHUNT_F8
#undef SHUNT_F4
#undef SHUNT_R64
#undef SHUNT_R32
#undef SHUNT_R16
#undef SHUNT_R8
#undef SHUNT_R4

// d = the products of one step of 128 along k.
template <int n>
__device__ __forceinline__ void step_e4m3(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {
  wgmma_e4m3<n, 0>(d, a, b);
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3<n, 1>(d, a + 2 * k, b + 2 * k);
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
