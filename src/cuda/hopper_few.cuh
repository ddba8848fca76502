// More of hopper.cuh, for tiles of few rows: wgmma with 16 columns, two floats of another block.
#pragma once

#include "cuda/hopper.cuh"

#if __CUDA_ARCH__ >= 900

namespace shunt::cuda_engine {

// Two floats, aligned to 8 bytes.
__device__ __forceinline__ void load_at(std::uint32_t remote, float (&to)[2]) {
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(to[0]), "=f"(to[1])
               : "r"(remote)
               : "memory");
}

}  // namespace shunt::cuda_engine

#endif

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

#define SHUNT_WGMMA_16(type)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type               \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"               \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
                 "+f"(d[6]), "+f"(d[7])                                                  \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[8], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_16("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[8], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_16("f16");
}
#undef SHUNT_WGMMA_16

}  // namespace shunt::cuda_engine

#endif
