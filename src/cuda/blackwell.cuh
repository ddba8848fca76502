// Thin wrappers of the PTX that came with the B200: tensor memory and tcgen05. Only where the code
// is compiled for sm_100a (SHUNT_SM_100A); names follow PTX. Compiled, not run: no such GPU was at
// hand.
//
// Tensor memory holds 128 lanes x 512 columns of 32 bits. An address is lane << 16 | column. Of a
// warpgroup, warp i reaches the lanes from 32 i to 32 i + 31.
#pragma once

#include <cstdint>

#include "cuda/hopper.cuh"
#include "cuda/stage_ring.cuh"
#include "cuda/tcgen05_words.hpp"

#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define SHUNT_SM_100A 1

namespace shunt::cuda_engine {

// ---- tensor memory ------------------------------------------------------------------------------

// A whole warp; `columns` a power of two from 32 to 512. Waits until others have freed as many; the
// address of the first appears in shared memory.
__device__ __forceinline__ void tcgen05_alloc(std::uint32_t* address, unsigned columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   shared_address(address)),
               "r"(columns)
               : "memory");
}
// A whole warp; the block will not allocate again, so that others of this multiprocessor may.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
// A whole warp, before the block ends.
__device__ __forceinline__ void tcgen05_dealloc(std::uint32_t address, unsigned columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}
// A whole warp: lane i gets columns 0 .. 31 from `address` on of its own lane of tensor memory.
// `address` names the first of the 32 lanes that the warp reaches. Waits for them.
__device__ __forceinline__ void tcgen05_ld_32(std::uint32_t (&r)[32], std::uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]),
        "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
        "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(address)
      : "memory");
}

// Around a barrier between threads that orders tcgen05 operations of one before those of another.
__device__ __forceinline__ void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// ---- products -----------------------------------------------------------------------------------

// Of a whole warp, the same one thread at each call.
__device__ __forceinline__ bool elect_one() {
  unsigned chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen)
               :
               : "memory");
  return chosen != 0;
}

// One thread: sums = a b, or sums + a b with `add`; 16 elements along K. Row i is lane i of tensor
// memory, column j is column j from `sums` on. Under way until tcgen05_commit's barrier says so.
__device__ __forceinline__ void tcgen05_mma(std::uint32_t sums, std::uint64_t a, std::uint64_t b,
                                            std::uint32_t instruction, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, add;\n}" ::"r"(sums),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<unsigned>(add))
      : "memory");
}
// The same in e2m1 with e4m3 for every 16 of k, 64 elements along K. Scales lie in tensor memory:
// row r's (of weights, and of rows) four in lane r % 32 of each warp's 32, column r / 32.
__device__ __forceinline__ void tcgen05_mma_fp4(std::uint32_t sums, std::uint64_t a,
                                                std::uint64_t b, std::uint32_t instruction,
                                                std::uint32_t a_scales, std::uint32_t b_scales,
                                                bool add) {
  asm volatile(
      "{\n.reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
      "[%0], %1, %2, %3, [%5], [%6], add;\n}" ::"r"(sums),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<unsigned>(add)), "r"(a_scales),
      "r"(b_scales)
      : "memory");
}
// The same of sparse rows of A: 128 elements along K, of every four pairs two, with e4m3 for every
// 32. What is kept lies in lane i of two columns of row i: four bits for eight elements, ascending.
__device__ __forceinline__ void tcgen05_mma_sparse_fp4(std::uint32_t sums, std::uint64_t a,
                                                       std::uint64_t b, std::uint32_t positions,
                                                       std::uint32_t instruction,
                                                       std::uint32_t a_scales,
                                                       std::uint32_t b_scales, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.sp.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
      "[%0], %1, %2, [%7], %3, [%5], [%6], add;\n}" ::"r"(sums),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<unsigned>(add)), "r"(a_scales),
      "r"(b_scales), "r"(positions)
      : "memory");
}
// One thread: 128 rows of 16 bytes of shared memory, to a lane each, four columns from `to` on. In
// order with the products that the same thread begins.
__device__ __forceinline__ void tcgen05_copy_positions(std::uint32_t to, std::uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(to), "l"(from) : "memory");
}
// One thread: 32 rows of 16 bytes of shared memory to as many lanes of each warp's 32, four columns
// from `to` on. In order with the products that the same thread begins.
__device__ __forceinline__ void tcgen05_copy_scales(std::uint32_t to, std::uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}
// Arrives once at `barrier` when all products that this thread has begun are done: operands read,
// sums written.
__device__ __forceinline__ void tcgen05_commit(std::uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

}  // namespace shunt::cuda_engine

#endif
