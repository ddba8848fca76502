// wgmma for 16-bit operands in shared memory, m64nNk16 for every N that the grouped GEMM uses; and
// what else its kernels need of Hopper: copies into all blocks of a cluster, arrivals at barriers
// of other blocks, transposing stores of tiles. Only where compiled for sm_90a.
#pragma once

#include "cuda/hopper.cuh"
#include "gemm/operand_lists.hpp"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// d += a b, as wgmma() of hopper.cuh; d has N / 2 floats or more, the first ones are used.
#define SHUNT_WGMMA(n, type, registers, a_at, b_at, ...)                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, " a_at ", " b_at ", 1, 1, 1, 0, 0;"                                       \
               : __VA_ARGS__                                                                 \
               : "l"(a), "l"(b))
#define SHUNT_WGMMA_ANY(type)                                                              \
  if constexpr (n == 8) SHUNT_WGMMA("8", type, SHUNT_R4, "%4", "%5", SHUNT_F4(0));         \
  if constexpr (n == 16) SHUNT_WGMMA("16", type, SHUNT_R8, "%8", "%9", SHUNT_F8(0));       \
  if constexpr (n == 32) SHUNT_WGMMA("32", type, SHUNT_R16, "%16", "%17", SHUNT_F16(0));   \
  if constexpr (n == 64) SHUNT_WGMMA("64", type, SHUNT_R32, "%32", "%33", SHUNT_F32(0));   \
  if constexpr (n == 96)                                                                   \
    SHUNT_WGMMA("96", type, SHUNT_R48, "%48", "%49", SHUNT_F32(0), SHUNT_F16(32));         \
  if constexpr (n == 128) SHUNT_WGMMA("128", type, SHUNT_R64, "%64", "%65", SHUNT_F64(0)); \
  if constexpr (n == 160)                                                                  \
    SHUNT_WGMMA("160", type, SHUNT_R80, "%80", "%81", SHUNT_F64(0), SHUNT_F16(64));        \
  if constexpr (n == 192)                                                                  \
    SHUNT_WGMMA("192", type, SHUNT_R96, "%96", "%97", SHUNT_F64(0), SHUNT_F32(64));        \
  if constexpr (n == 224)                                                                  \
    SHUNT_WGMMA("224", type, SHUNT_R112, "%112", "%113", SHUNT_F64(0), SHUNT_F32(64),      \
                SHUNT_F16(96));                                                            \
  if constexpr (n == 256)                                                                  \
  SHUNT_WGMMA("256", type, SHUNT_R128, "%128", "%129", SHUNT_F64(0), SHUNT_F64(64))

template <int n, int floats>
__device__ __forceinline__ void wgmma_n(__nv_bfloat16, float (&d)[floats], std::uint64_t a,
                                        std::uint64_t b) {
  static_assert(floats >= n / 2);
  SHUNT_WGMMA_ANY("bf16");
}
template <int n, int floats>
__device__ __forceinline__ void wgmma_n(__half, float (&d)[floats], std::uint64_t a,
                                        std::uint64_t b) {
  static_assert(floats >= n / 2);
  SHUNT_WGMMA_ANY("f16");
}

#undef SHUNT_WGMMA_ANY
#undef SHUNT_WGMMA

// What generic stores of this thread, or of others that it has waited for, left in shared memory
// may be read by wgmma and copies after this.
__device__ __forceinline__ void fence_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As copy_bytes(); what comes leaves the L2 first.
__device__ __forceinline__ void copy_bytes_once(void* to, const void* from, unsigned bytes,
                                                std::uint64_t* barrier) {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The box at shared address `from` to coordinates of a map of three dimensions. By one thread,
// which commits it and waits for it: until all but the last `pending` commits have been read, or
// until everything is written.
__device__ __forceinline__ void store_box(const void* map, std::uint32_t from, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait_for_boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
__device__ __forceinline__ void wait_for_boxes_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// At the barrier in the same place of block `rank` of the cluster. Orders nothing: for what wgmma
// has read, and has been waited for. (Released to a cluster, an arrival costs a thousand clocks.)
__device__ __forceinline__ void mbarrier_free_at(std::uint64_t* barrier, unsigned rank) {
  mbarrier_free_at(address_of_rank(barrier, rank));
}
// Likewise; what this thread wrote, and what it waited for, is seen by who waits.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// A float in the same place of block `rank` of the cluster.
__device__ __forceinline__ float float_of_rank(const float* local, unsigned rank) {
  float value;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n}"
      : "=f"(value)
      : "r"(shared_address(local)), "r"(rank)
      : "memory");
  return value;
}
// mbarrier_wait() for what other blocks of the cluster did before they arrived.
__device__ __forceinline__ void mbarrier_wait_cluster(std::uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra leave;\n"
      "bra again;\n"
      "leave:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Arrives once this thread's cp_async copies so far have landed; counts as one of the arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Four 8x8 tiles of 16-bit numbers, each thread's as an accumulator of mma has them, written
// transposed: lane l gives the address of 16 bytes, line l % 8 of tile l / 8.
__device__ __forceinline__ void stmatrix_x4_transposed(std::uint32_t address,
                                                       const std::uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

template <int registers>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
// Arrives at a barrier of `threads` threads that the others wait at.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A barrier of `threads` threads; 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace shunt::cuda_engine

#endif
