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

#undef SHUNT_WGMMA

// d = the products of one step of 128 along k.
template <int n>
__device__ __forceinline__ void step_e4m3(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {
  wgmma_e4m3<n, 0>(d, a, b);
#pragma unroll
  for (unsigned k = 1; k < 4; ++k) wgmma_e4m3<n, 1>(d, a + 2 * k, b + 2 * k);
}

}  // namespace shunt::cuda_engine

#endif
