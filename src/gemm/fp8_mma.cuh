// wgmma for e4m3 operands in shared memory, m64nNk32. Only where compiled for sm_90a.
//
// A row of an operand is 128 numbers along k in 128 bytes, swizzled: wgmma_descriptor() as it is,
// 32 numbers further along k: add 2. The tensor cores add the products of an instruction to the
// sums with fewer bits than f32 has: sums of more than 128 products must leave them (promotion).
#pragma once

#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_WGMMA(type, wide, a_at, b_at, add_at, ...)                                  \
  if constexpr (n == wide)                                                                \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_at                         \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #wide "k32.f32." type "." type \
                 " {" SHUNT_R##wide "}, %" #a_at ", %" #b_at ", add, 1, 1;\n}"            \
                 : SHUNT_D##wide                                                          \
                 : "l"(a), "l"(b), "n"(add));

// d = a b, or with `add` d += a b.
template <int n, int add>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {
  static_assert(is_width<n>);
  SHUNT_EACH_WIDTH(SHUNT_WGMMA, "e4m3")
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
