// The sort at the end of another stage's kernel, whose blocks wrote the ids.
//
//   run_sort_tail(tail, rank)
// All threads of the blocks that wrote ids call it, after a barrier of their block (of their
// cluster where several sort) that follows their last store. With a ticket, the block that draws
// the last of tail.arrivals sorts: its fence, and that of every other block, stand between their
// ids and it. Without one the caller is the only block, or a cluster's that sort together; `rank`
// is the block's. Dynamic shared memory is overwritten.
//   zero_ahead(tail, block, blocks)
// All blocks of the kernel call it, before or after: the sort itself zeroes nothing.
#pragma once

#include "order/sort.cuh"
#include "order/sort_few.cuh"

namespace shunt::ordering {

// Not inlined: dozens of kernels share these. By value, as parameters of a kernel cannot be reached
// quickly from outside it.
static __device__ __noinline__ void tail_few(const SortJob job, unsigned block) {
  extern __shared__ __align__(16) std::int32_t tail_memory[];
  sort_few(job.call, job.plan, block, reinterpret_cast<std::uint32_t*>(tail_memory));
}
template <bool padded>
static __device__ __noinline__ void tail_counted(const SortJob job) {
  extern __shared__ __align__(16) std::int32_t tail_memory[];
  sort_pairs<false, 4, padded>(job.call, job.plan, 0, tail_memory);
}

__device__ __forceinline__ void zero_ahead(const SortTail& tail, unsigned block, unsigned blocks) {
  if (tail.job.call.zeroed_bytes == 0) return;
  zero_share(tail.job.call.zeroed, tail.job.call.zeroed_bytes,
             std::size_t{block} * blockDim.x + threadIdx.x, std::size_t{blocks} * blockDim.x);
}

__device__ __forceinline__ void run_sort_tail(const SortTail& tail, unsigned rank) {
  unsigned block = rank;
  if (tail.ticket != nullptr) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(tail.ticket, 1U) + 1 == tail.arrivals;
      if (last) *tail.ticket = 0;
      __threadfence();
    }
    __syncthreads();
    if (!last) return;
    block = 0;
  }
  const SortPlan& plan = tail.job.plan;
  if (block >= plan.parts) return;
  if (plan.compare_lanes > 0) {
    tail_few(tail.job, block);
  } else if (plan.padded) {
    tail_counted<true>(tail.job);
  } else {
    tail_counted<false>(tail.job);
  }
}

}  // namespace shunt::ordering
