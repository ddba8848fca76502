// Gate and order in one launch, for few tokens: from logits [T, C] in memory to ids and weights,
// and to the ids' order.
//
// One cluster. A warp takes one row, as in route/gate.cu; ids go to memory, since they are an
// output; after one barrier of the cluster they are in the L2 for all of it, and its blocks compare
// (order/sort_few.cuh) or count (order/sort.cuh) them. Further clusters only zero.
//
// Time: a gate's, plus some 0.3 us for the barrier, 0.6 us until ids are back, 0.3 to 0.7 us for
// the sort. A second launch takes 1.1 us and the last two.
#include "cuda/launch.hpp"
#include "cuda/mma.cuh"
#include "order/sort.cuh"
#include "order/sort_few.cuh"
#include "route/rows.cuh"
#include "route_and_order/cuda.hpp"

namespace shunt::routing {

namespace {

using ordering::SortJob;

constexpr int most_warps = 16;

struct Logits {
  const void* data = nullptr;
  Form form = Form::f32;
  std::int64_t stride = 0;
};

__device__ __forceinline__ LogitRow row_of(const Logits& logits, std::int64_t t) {
  const std::int64_t bytes = logits.form == Form::f32 ? 4 : 2;
  return {static_cast<const char*>(logits.data) + t * logits.stride * bytes, logits.form};
}

// Every rule, by route_row<N, grouped>.
template <int N, bool grouped>
struct AnyGate {
  __device__ static __forceinline__ void route(const DeviceRoute& r, const Logits& logits,
                                               std::int64_t t, int lane) {
    const LogitRow row = row_of(logits, t);
    float own[N] = {};
    if (r.quick) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int e = expert_of<N, grouped>(lane, i);
        if (e < r.rule.experts) own[i] = row(e);
      }
    }
    route_row<N, grouped>(r, row, own, t, lane);
  }
};

template <class Gate, bool padded>
__global__ void __launch_bounds__(32 * most_warps)
    gate_order(const __grid_constant__ DeviceRoute r, const Logits logits,
               const __grid_constant__ SortJob job) {
  extern __shared__ __align__(16) std::int32_t shared[];
  cuda_engine::wait_for_predecessor();
  cuda_engine::let_successor_start();
  const unsigned blocks = job.plan.cluster;
  if (blockIdx.x >= blocks) return ordering::zero_blocks(job, blocks);

  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t warps = std::int64_t{blocks} * (blockDim.x >> 5);
  const std::int64_t valid = valid_tokens(r);
#pragma unroll 1
  for (std::int64_t t = std::int64_t{threadIdx.x >> 5} * blocks + blockIdx.x; t < r.tokens;
       t += warps) {
    if (t < valid) {
      Gate::route(r, logits, t, lane);
    } else {
      clear_row(r, t, lane);
    }
  }
  if (blocks > 1) {
    cuda_engine::cluster_barrier();  // all ids are written
  } else {
    __syncthreads();
  }
  if constexpr (!padded) {
    if (job.plan.compare_lanes > 0) {
      return ordering::sort_few(job.call, job.plan, blockIdx.x,
                                reinterpret_cast<std::uint32_t*>(shared));
    }
  }
  ordering::sort_pairs<true, 4, padded>(job.call, job.plan, 0, shared);
}

template <class Gate>
void launch_gate_order(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Logits& logits,
                       const SortJob& job) {
  const cuda_engine::Shape shape{.grid = {job.plan.cluster + job.plan.zero_blocks, 1, 1},
                                 .block = {job.plan.threads, 1, 1},
                                 .shared = job.plan.shared_bytes(),
                                 .cluster = job.plan.cluster};
  if (job.plan.padded) {
    cuda_engine::launch("route_and_order", gpu, shape, gate_order<Gate, true>, r, logits, job);
  } else {
    cuda_engine::launch("route_and_order", gpu, shape, gate_order<Gate, false>, r, logits, job);
  }
}

}  // namespace

bool gate_orders(const cuda_engine::Gpu& gpu, std::int64_t tokens) {
  return tokens <= std::int64_t{most_warps} * gpu.widest_cluster;
}

void gate_order_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits,
                     const OrderCall& ordered) {
  // A block for up to 16 tokens; eight a block beyond, as far as a cluster goes.
  const auto tokens = static_cast<unsigned>(r.tokens);
  unsigned blocks = 1;
  while (blocks * 2 <= static_cast<unsigned>(gpu.widest_cluster) &&
         blocks * (blocks == 1 ? 16 : 8) < tokens) {
    blocks *= 2;
  }
  const unsigned warps = (tokens + blocks - 1) / blocks;
  const unsigned threads = 32 * std::clamp(warps, 4U, static_cast<unsigned>(most_warps));
  const ordering::SortLimits limits = ordering::sort_limits(gpu);
  SortJob job{ordered, ordering::make_tail_plan(ordered, limits, blocks, threads, false)};
  job.plan.cluster = blocks;
  ordering::add_zero_blocks(job.plan, ordered, limits);
  const Logits from{logits.data, static_cast<Form>(logits.dtype), logits.strides[0]};
  with_per_lane(r.per_lane, [&]<int N>() {
    r.grouped ? launch_gate_order<AnyGate<N, true>>(gpu, r, from, job)
              : launch_gate_order<AnyGate<N, false>>(gpu, r, from, job);
  });
}

}  // namespace shunt::routing
