// wgmma for 16-bit operands in shared memory, m64nNk16 for every N that the grouped GEMM uses; and
// what else its kernels need of Hopper: copies into all blocks of a cluster, arrivals at barriers
// of other blocks, transposing stores of tiles. Only where compiled for sm_90a.
#pragma once

#include "cuda/hopper.cuh"
#include "gemm/operand_lists.hpp"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// A width that there is no case for would be no instruction at all.
template <int n>
constexpr bool is_width = n == 8 || (n >= 16 && n <= 256 && n % 16 == 0);

// d += a b, as wgmma() of hopper.cuh; d has N / 2 floats or more, the first ones are used.
#define SHUNT_WGMMA(type, wide, a_at, b_at, ...)                                    \
  if constexpr (n == wide)                                                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #wide "k16.f32." type "." type \
                 " {" SHUNT_R##wide "}, %" #a_at ", %" #b_at ", 1, 1, 1, 0, 0;"     \
                 : SHUNT_D##wide                                                    \
                 : "l"(a), "l"(b));
template <int n, int floats>
__device__ __forceinline__ void wgmma_n(__nv_bfloat16, float (&d)[floats], std::uint64_t a,
                                        std::uint64_t b) {
  static_assert(is_width<n> && floats >= n / 2);
  SHUNT_EACH_WIDTH(SHUNT_WGMMA, "bf16")
}
template <int n, int floats>
__device__ __forceinline__ void wgmma_n(__half, float (&d)[floats], std::uint64_t a,
                                        std::uint64_t b) {
  static_assert(is_width<n> && floats >= n / 2);
  SHUNT_EACH_WIDTH(SHUNT_WGMMA, "f16")
}
#undef SHUNT_WGMMA

// Calls f<n>() for the least n = least, least + more, .. most that holds `count` columns.
template <int least, int more, int most, class F>
__device__ __forceinline__ void with_width(int count, const F& f) {
  if constexpr (least >= most) {
    f.template operator()<most>();
  } else if (count <= least) {
    f.template operator()<least>();
  } else {
    with_width<least + more, more, most>(count, f);
  }
}

// What generic stores of this thread, or of others that it has waited for, left in shared memory
// may be read by wgmma and copies after this.
__device__ __forceinline__ void fence_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// How long a tile's weights stay in the L2: those that no other tile reads leave it first, others
// are there for them (docs/notes/cuda-gemm.md, "Weights that several tiles read").
__device__ __forceinline__ std::uint64_t weights_policy(bool alone) {
  std::uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return alone ? first : normal;
}

// As copy_bytes(), by a policy.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, unsigned bytes,
                                           std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// What comes leaves the L2 first.
__device__ __forceinline__ void copy_bytes_once(void* to, const void* from, unsigned bytes,
                                                std::uint64_t* barrier) {
  copy_bytes(to, from, bytes, barrier, weights_policy(true));
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
