// What the sorting kernels are made of: clusters, experts of ids, zeroing, tables in shared memory.
// Before Hopper every block is a cluster of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/launch.hpp"
#include "order/sort_plan.hpp"

namespace shunt::ordering {

// ---- clusters ----------------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The int at `address` of block `rank`'s shared memory.
__device__ __forceinline__ std::int32_t load_remote(std::uint32_t address, unsigned rank) {
  std::int32_t value = 0;
#if __CUDA_ARCH__ < 900
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
#else
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(remote));
#endif
  return value;
}

constexpr unsigned every_lane = 0xffffffffU;

// ---- small parts -------------------------------------------------------------------------------

// Ids through the map, to what local_expert() takes. Out of line: most calls have none.
__device__ __noinline__ inline int4 look_up(const std::int32_t* map, std::uint32_t experts,
                                            int4 ids) {
  const auto of = [&](std::int32_t id) {
    return static_cast<std::uint32_t>(id) < experts ? map[id] : -1;
  };
  return {of(ids.x), of(ids.y), of(ids.z), of(ids.w)};
}
__device__ __forceinline__ void map_ids(const OrderCall& call, int4& ids) {
  if (call.expert_map == nullptr) return;
  ids = look_up(call.expert_map, static_cast<std::uint32_t>(call.experts), ids);
}

// The index of a mapped id among the local experts, or -1. With a map the first expert is 0.
__device__ __forceinline__ std::int32_t local_expert(const OrderCall& call, std::int32_t id) {
  const std::uint32_t local =
      static_cast<std::uint32_t>(id) - static_cast<std::uint32_t>(call.first_expert);
  return local < static_cast<std::uint32_t>(call.locals) ? static_cast<std::int32_t>(local) : -1;
}

// Pairs of valid tokens.
__device__ __forceinline__ std::uint32_t valid_pairs(const OrderCall& call) {
  const auto tokens = static_cast<std::int32_t>(call.tokens);
  std::int32_t valid = tokens;
  if (call.valid_tokens != nullptr) valid = min(max(__ldcg(call.valid_tokens), 0), tokens);
  return static_cast<std::uint32_t>(valid) * static_cast<std::uint32_t>(call.slots);
}

// Zeroes a worker's share; at least 16 workers.
__device__ __noinline__ inline void zero_share(std::byte* data, std::size_t bytes,
                                               std::size_t worker, std::size_t workers) {
  const std::size_t aligned = -reinterpret_cast<std::uintptr_t>(data) & 15;
  const std::size_t head = aligned < bytes ? aligned : bytes;
  const std::size_t vectors = (bytes - head) / 16;
  auto* const body = reinterpret_cast<int4*>(data + head);
#pragma unroll 1
  for (std::size_t i = worker; i < vectors; i += workers) body[i] = int4{0, 0, 0, 0};
  if (worker < head) data[worker] = std::byte{0};
  const std::size_t tail = head + 16 * vectors;
  if (worker < bytes - tail) data[tail + worker] = std::byte{0};
}

// What a block beyond those that sort does.
__device__ __forceinline__ void zero_blocks(const SortJob& job, unsigned sorting) {
  zero_share(job.call.zeroed, job.call.zeroed_bytes,
             std::size_t{blockIdx.x - sorting} * blockDim.x + threadIdx.x,
             std::size_t{job.plan.zero_blocks} * blockDim.x);
}

__device__ __forceinline__ std::int32_t inclusive_scan(std::int32_t value, unsigned lane) {
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::int32_t other = __shfl_up_sync(every_lane, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

struct Tables {
  std::int32_t* segment;   // [L]
  std::int32_t* first;     // [L + 1]
  std::int32_t* counters;  // [rows][L]
  std::int32_t* padded;    // [L + 1]
  std::int32_t* base;      // [L + 1]
  std::int32_t* local;     // [L]
  std::uint32_t* stage;    // [share]
  float* stage_weights;    // [share]
  std::int32_t* sums;      // [2][3][32]

  __device__ __forceinline__ Tables(const SortPlan& plan, std::int32_t* shared) {
    sums = shared;
    segment = sums + SortPlan::sums;
    first = segment + plan.stride;
    counters = first + plan.stride;
    padded = counters + plan.rows * plan.stride;
    base = padded + (plan.padded ? plan.stride : 0);
    local = base + (plan.padded ? plan.stride : 0);
    stage = reinterpret_cast<std::uint32_t*>(local + (plan.staged ? plan.stride : 0));
    stage_weights = reinterpret_cast<float*>(stage + plan.share);
  }
};

__device__ __forceinline__ void clear_tables(const SortPlan& plan, std::int32_t* shared) {
  const unsigned vectors = (2 + plan.rows) * plan.stride / 4;
  auto* const body = reinterpret_cast<int4*>(shared + SortPlan::sums);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < vectors; i += blockDim.x) body[i] = int4{0, 0, 0, 0};
}

// Parameters lie in constant memory, new with every launch: one load asks for all lines of it at
// once, so that later uses do not each wait for theirs.
template <class Parameters>
__device__ __forceinline__ void touch(const Parameters& parameters, std::int32_t* scratch) {
  constexpr unsigned lines = (sizeof(Parameters) + 63) / 64;
  if (threadIdx.x < lines) {
    scratch[threadIdx.x] = reinterpret_cast<const std::int32_t*>(&parameters)[16 * threadIdx.x];
  }
}

}  // namespace shunt::ordering
