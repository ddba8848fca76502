// wgmma with A from registers, for weights that were decoded into them: m64nNk16, and m64nNk32
// where two of every four of A are kept. Of its warpgroup a warp has 16 rows of A, in the registers
// of mma.m16n8k16. Only where compiled for sm_90a.
//
// A register that an instruction under way reads must not be written: decode into others, and wait.
#pragma once

#include "gemm/wgmma.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_R24 SHUNT_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SHUNT_WGMMA(n, type, registers, a_at, b_at, ...)                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, {" a_at "}, " b_at ", 1, 1, 1, 0;"                                        \
               : __VA_ARGS__                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define SHUNT_WGMMA_ANY(type)                                                                      \
  if constexpr (n == 16)                                                                           \
    SHUNT_WGMMA("16", type, SHUNT_R8, "%8, %9, %10, %11", "%12", SHUNT_F8(0));                     \
  if constexpr (n == 32)                                                                           \
    SHUNT_WGMMA("32", type, SHUNT_R16, "%16, %17, %18, %19", "%20", SHUNT_F16(0));                 \
  if constexpr (n == 48)                                                                           \
    SHUNT_WGMMA("48", type, SHUNT_R24, "%24, %25, %26, %27", "%28", SHUNT_F16(0), SHUNT_F8(16));   \
  if constexpr (n == 64)                                                                           \
    SHUNT_WGMMA("64", type, SHUNT_R32, "%32, %33, %34, %35", "%36", SHUNT_F32(0));                 \
  if constexpr (n == 96)                                                                           \
    SHUNT_WGMMA("96", type, SHUNT_R48, "%48, %49, %50, %51", "%52", SHUNT_F32(0), SHUNT_F16(32));  \
  if constexpr (n == 128)                                                                          \
    SHUNT_WGMMA("128", type, SHUNT_R64, "%64, %65, %66, %67", "%68", SHUNT_F64(0));                \
  if constexpr (n == 160)                                                                          \
    SHUNT_WGMMA("160", type, SHUNT_R80, "%80, %81, %82, %83", "%84", SHUNT_F64(0), SHUNT_F16(64)); \
  if constexpr (n == 192)                                                                          \
    SHUNT_WGMMA("192", type, SHUNT_R96, "%96, %97, %98, %99", "%100", SHUNT_F64(0),                \
                SHUNT_F32(64));                                                                    \
  if constexpr (n == 256)                                                                          \
  SHUNT_WGMMA("256", type, SHUNT_R128, "%128, %129, %130, %131", "%132", SHUNT_F64(0),             \
              SHUNT_F64(64))
#define SHUNT_SPARSE(n, type, registers, a_at, b_at, e_at, s_at, ...)                           \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" n "k32.f32." type "." type " {" registers \
               "}, {" a_at "}, " b_at ", " e_at ", " s_at ", 1, 1, 1, 0;"                       \
               : __VA_ARGS__                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(positions),            \
                 "n"(selector))
#define SHUNT_SPARSE_ANY(type)                                                                     \
  if constexpr (n == 16)                                                                           \
    SHUNT_SPARSE("16", type, SHUNT_R8, "%8, %9, %10, %11", "%12", "%13", "%14", SHUNT_F8(0));      \
  if constexpr (n == 32)                                                                           \
    SHUNT_SPARSE("32", type, SHUNT_R16, "%16, %17, %18, %19", "%20", "%21", "%22", SHUNT_F16(0));  \
  if constexpr (n == 48)                                                                           \
    SHUNT_SPARSE("48", type, SHUNT_R24, "%24, %25, %26, %27", "%28", "%29", "%30", SHUNT_F16(0),   \
                 SHUNT_F8(16));                                                                    \
  if constexpr (n == 64)                                                                           \
    SHUNT_SPARSE("64", type, SHUNT_R32, "%32, %33, %34, %35", "%36", "%37", "%38", SHUNT_F32(0));  \
  if constexpr (n == 96)                                                                           \
    SHUNT_SPARSE("96", type, SHUNT_R48, "%48, %49, %50, %51", "%52", "%53", "%54", SHUNT_F32(0),   \
                 SHUNT_F16(32));                                                                   \
  if constexpr (n == 128)                                                                          \
    SHUNT_SPARSE("128", type, SHUNT_R64, "%64, %65, %66, %67", "%68", "%69", "%70", SHUNT_F64(0)); \
  if constexpr (n == 160)                                                                          \
    SHUNT_SPARSE("160", type, SHUNT_R80, "%80, %81, %82, %83", "%84", "%85", "%86", SHUNT_F64(0),  \
                 SHUNT_F16(64));                                                                   \
  if constexpr (n == 192)                                                                          \
    SHUNT_SPARSE("192", type, SHUNT_R96, "%96, %97, %98, %99", "%100", "%101", "%102",             \
                 SHUNT_F64(0), SHUNT_F32(64));                                                     \
  if constexpr (n == 256)                                                                          \
  SHUNT_SPARSE("256", type, SHUNT_R128, "%128, %129, %130, %131", "%132", "%133", "%134",          \
               SHUNT_F64(0), SHUNT_F64(64))

// d += a b for the first n / 2 floats of d, four registers from `a`; b is a wgmma_descriptor().
template <int n, bool bf16, int floats>
__device__ __forceinline__ void wgmma_registers(float (&d)[floats], const std::uint32_t* a,
                                                std::uint64_t b) {
  static_assert(floats >= n / 2);
  if constexpr (bf16) {
    SHUNT_WGMMA_ANY("bf16");
  } else {
    SHUNT_WGMMA_ANY("f16");
  }
}
// Of 32 of k; `selector`: which pair of threads of each four has the positions.
template <int n, bool bf16, int selector, int floats>
__device__ __forceinline__ void wgmma_sparse(float (&d)[floats], const std::uint32_t* a,
                                             std::uint64_t b, std::uint32_t positions) {
  static_assert(floats >= n / 2);
  if constexpr (bf16) {
    SHUNT_SPARSE_ANY("bf16");
  } else {
    SHUNT_SPARSE_ANY("f16");
  }
}

#undef SHUNT_R24
#undef SHUNT_SPARSE_ANY
#undef SHUNT_SPARSE
#undef SHUNT_WGMMA_ANY
#undef SHUNT_WGMMA

}  // namespace shunt::cuda_engine

#endif
