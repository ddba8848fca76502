// Thin wrappers of PTX that came with Hopper: barriers in shared memory that count bytes and bulk
// tensor copies, from sm_90 on; wgmma, only where the code is compiled for sm_90a (SHUNT_SM_90A).
// Names follow PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/mma.cuh"

#if __CUDA_ARCH__ >= 900

namespace shunt::cuda_engine {

// ---- barriers -----------------------------------------------------------------------------------

// By one thread; mbarrier_init_fence() after the last, then a barrier of the block.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives, and lets the phase end only when so many bytes have come too.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Until the phase of this parity has ended; phases begin with 0. By address in shared memory: where
// a loop waits, made once before it, for the compiler else works it out each time, some 60 clocks.
__device__ __forceinline__ void wait_at(std::uint32_t barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra leave;\n"
      "bra again;\n"
      "leave:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, unsigned parity) {
  wait_at(shared_address(barrier), parity);
}
__device__ __forceinline__ void arrive_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival does not wait for loads of shared memory before it, only what uses their values does.
// Stores that it allows queue behind them; a bulk copy does not, and overwrites what they are still
// to read (docs/notes/cuda-fp8.md). So where a bulk copy follows, an address that needs `loaded`,
// the bits of what was loaded last: loads of a warp are answered in order. `zero`: unknown_zero().
__device__ __forceinline__ std::uint32_t once_loaded(std::uint32_t address, std::uint32_t loaded,
                                                     std::uint32_t zero) {
  return address + (loaded & zero);
}
// 0, which the compiler cannot know: of a grid with one block along z.
__device__ __forceinline__ std::uint32_t unknown_zero() {
  std::uint32_t zero;
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(zero));
  return zero;
}

// ---- bulk copies --------------------------------------------------------------------------------

// `bytes` as they lie, a multiple of 16, as are both addresses; they count at `barrier`.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, unsigned bytes,
                                           std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// ---- bulk tensor copies -------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box that begins at element (column, row) of the tensor, to shared memory of this block; its
// bytes count at `barrier`, zeros beyond the tensor's edges included.
__device__ __forceinline__ void copy_box(void* to, const void* map, std::uint64_t* barrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
// The same to the same place of each block of the cluster whose bit is set in `ranks`; its bytes
// count at the barrier at `barrier`'s place there.
__device__ __forceinline__ void copy_box_to_ranks(void* to, const void* map, std::uint64_t* barrier,
                                                  int column, int row, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(ranks)
      : "memory");
}
// Likewise from a map of three dimensions.
__device__ __forceinline__ void copy_box(void* to, const void* map, std::uint64_t* barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void copy_box_to_ranks(void* to, const void* map, std::uint64_t* barrier,
                                                  int x, int y, int z, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(ranks)
      : "memory");
}

// ---- other blocks of the cluster ----------------------------------------------------------------

// Of this cluster along x.
__device__ __forceinline__ unsigned cluster_index() {
  unsigned index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
// Where `local` lies in block `rank`; for the functions below.
__device__ __forceinline__ std::uint32_t address_of_rank(const void* local, unsigned rank) {
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(shared_address(local)), "r"(rank));
  return remote;
}
// Orders nothing that other blocks are to see: for what has been read, not for what was written.
__device__ __forceinline__ void mbarrier_free_at(std::uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
// Two floats, aligned to 8 bytes.
__device__ __forceinline__ void load_at(std::uint32_t remote, float (&to)[2]) {
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(to[0]), "=f"(to[1])
               : "r"(remote)
               : "memory");
}
// Four floats, aligned to 16 bytes.
__device__ __forceinline__ void load_at(std::uint32_t remote, float (&to)[4]) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(remote)
               : "memory");
}

}  // namespace shunt::cuda_engine

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SHUNT_SM_90A 1

namespace shunt::cuda_engine {

// ---- wgmma --------------------------------------------------------------------------------------

// Rows of 64 16-bit elements (128 bytes) along K, 16-byte pieces swizzled by the row, as a tensor
// map with the 128-byte swizzle leaves them; `address` a multiple of 1024 bytes. 16 elements
// further along K: add 2.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3ffff) >> 4} | std::uint64_t{1} << 16 |
         std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of this warpgroup's groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// d += a b, m64nNk16 for N = twice the floats of d, both operands in shared memory and K-major. Of
// its warpgroup, a thread has the rows 16 warp + lane / 4 (d[4 j], d[4 j + 1]) and 8 further
// (d[4 j + 2], d[4 j + 3]), columns 8 j + 2 (lane % 4) and the next.
#define SHUNT_D8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SHUNT_WGMMA_16(type)                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;" \
               : SHUNT_D8(0)                                               \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[8], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_16("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[8], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_16("f16");
}
#undef SHUNT_WGMMA_16
#define SHUNT_WGMMA_32(type)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type               \
               " {"                                                                      \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
               "%16, %17, 1, 1, 1, 0, 0;"                                                \
               : SHUNT_D8(0), SHUNT_D8(8)                                                \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[16], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_32("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[16], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_32("f16");
}
#undef SHUNT_WGMMA_32
#define SHUNT_WGMMA_64(type)                                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                         \
               " {"                                                                                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, 1, 1, 1, 0, 0;"                                                          \
               : SHUNT_D8(0), SHUNT_D8(8), SHUNT_D8(16), SHUNT_D8(24)                              \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[32], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_64("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[32], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_64("f16");
}
#undef SHUNT_WGMMA_64
#define SHUNT_WGMMA_128(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                        \
               " {"                                                                                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
               "%64, %65, 1, 1, 1, 0, 0;"                                                          \
               : SHUNT_D8(0), SHUNT_D8(8), SHUNT_D8(16), SHUNT_D8(24), SHUNT_D8(32), SHUNT_D8(40), \
                 SHUNT_D8(48), SHUNT_D8(56)                                                        \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[64], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_128("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[64], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_128("f16");
}
#undef SHUNT_WGMMA_128
#define SHUNT_WGMMA_256(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                        \
               " {"                                                                                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "  \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "  \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "  \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "  \
               "%110, %111, "                                                                      \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "    \
               "%125, %126, %127}, "                                                               \
               "%128, %129, 1, 1, 1, 0, 0;"                                                        \
               : SHUNT_D8(0), SHUNT_D8(8), SHUNT_D8(16), SHUNT_D8(24), SHUNT_D8(32), SHUNT_D8(40), \
                 SHUNT_D8(48), SHUNT_D8(56), SHUNT_D8(64), SHUNT_D8(72), SHUNT_D8(80),             \
                 SHUNT_D8(88), SHUNT_D8(96), SHUNT_D8(104), SHUNT_D8(112), SHUNT_D8(120)           \
               : "l"(a), "l"(b))
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[128], std::uint64_t a,
                                      std::uint64_t b) {
  SHUNT_WGMMA_256("bf16");
}
__device__ __forceinline__ void wgmma(__half, float (&d)[128], std::uint64_t a, std::uint64_t b) {
  SHUNT_WGMMA_256("f16");
}
#undef SHUNT_WGMMA_256
#undef SHUNT_D8

}  // namespace shunt::cuda_engine

#endif
