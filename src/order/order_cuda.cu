// order() on CUDA: one launch of plan.parts clusters that sort (sort.cuh) and of blocks that zero.
//
// Time predicted on an H200, from a launch of 1.1 us in a graph: ids 0.5 us away; a segment counted
// at 8 cycles for 32 ids; 0.5 us for a cluster to exchange counts; scattered stores at a cycle each
// and multiprocessor. 8 pairs: 2 us; 65536 on 16 clusters of 8: 4 us; 262144: 8 us. Measured: 1.7,
// 12.1 and 19.5 (docs/performance.md).
#include "order/order_cuda.hpp"
#include "order/sort.cuh"
#include "order/sort_few.cuh"
#include "order/sort_few_tiles.cuh"

namespace shunt {

namespace ordering {

namespace {

template <bool clustered, int kept, bool padded>
__global__ void __launch_bounds__(1024) sort_kernel(const __grid_constant__ SortJob job) {
  extern __shared__ __align__(16) std::int32_t shared[];
  touch(job, shared);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const unsigned part = clustered ? blockIdx.x / job.plan.cluster : blockIdx.x;
  if (part >= job.plan.parts) return zero_blocks(job, job.plan.parts * job.plan.cluster);
  sort_pairs<clustered, kept, padded>(job.call, job.plan, part, shared);
}

__global__ void __launch_bounds__(1024) few_kernel(const __grid_constant__ SortJob job) {
  extern __shared__ __align__(16) std::int32_t shared[];
  touch(job, shared);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  if (blockIdx.x >= job.plan.parts) return zero_blocks(job, job.plan.parts);
  sort_few(job.call, job.plan, blockIdx.x, reinterpret_cast<std::uint32_t*>(shared));
}

__global__ void __launch_bounds__(1024) few_tiles_kernel(const __grid_constant__ SortJob job) {
  extern __shared__ __align__(16) std::int32_t shared[];
  touch(job, shared);
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  if (blockIdx.x >= job.plan.parts) return zero_blocks(job, job.plan.parts);
  sort_few_tiles(job.call, job.plan, blockIdx.x, shared);
}

using Kernel = void (*)(SortJob);

template <bool padded>
Kernel sort_kernel_of(const SortPlan& plan) {
  if (plan.cluster > 1) return sort_kernel<true, 4, padded>;
  return plan.chunks == 1 ? sort_kernel<false, 1, padded> : sort_kernel<false, 4, padded>;
}

}  // namespace

SortLimits sort_limits(const cuda_engine::Gpu& gpu) {
  return {.multiprocessors = gpu.multiprocessors,
          .shared_bytes = gpu.shared_bytes,
          .largest_cluster = static_cast<unsigned>(gpu.largest_cluster)};
}

SortTail sort_tail(const cuda_engine::Gpu& gpu, const OrderCall& call, unsigned blocks,
                   unsigned threads, unsigned arrivals) {
  SortTail tail{.job = {call, make_tail_plan(call, sort_limits(gpu), blocks, threads, true)},
                .arrivals = arrivals};
  tail.job.plan.zero_blocks = 1;  // the kernel zeroes
  if (arrivals > 1) tail.ticket = gpu.tickets + cuda_engine::order_tickets;
  return tail;
}

void launch_sort(const cuda_engine::Gpu& gpu, const OrderCall& call, const SortPlan& plan) {
  const cuda_engine::Shape shape{.grid = {plan.parts * plan.cluster + plan.zero_blocks, 1, 1},
                                 .block = {plan.threads, 1, 1},
                                 .shared = plan.shared_bytes(),
                                 .cluster = plan.cluster};
  const bool few = plan.compare_lanes > 0;
  const Kernel kernel = few           ? plan.padded ? few_tiles_kernel : few_kernel
                        : plan.padded ? sort_kernel_of<true>(plan)
                                      : sort_kernel_of<false>(plan);
  cuda_engine::launch("order", gpu, shape, kernel, SortJob{call, plan});
}

}  // namespace ordering

void order_cuda(const Context& context, const OrderCall& call) {
  const cuda_engine::Gpu& gpu = cuda_engine::gpu(context);
  ordering::launch_sort(gpu, call, ordering::choose_plan(call, ordering::sort_limits(gpu)));
}

}  // namespace shunt
