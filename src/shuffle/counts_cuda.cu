// Counts to offsets and back, on the device: one block, some 3 us.
#include "cuda/launch.hpp"
#include "shuffle/engine.hpp"

namespace shunt {

namespace {

using cuda_engine::let_successor_start;
using cuda_engine::wait_for_predecessor;

constexpr int threads = 1024;
constexpr unsigned all = 0xffffffffu;

// Sums that 32 bits do not hold stay at the largest: rows past it have no room anywhere.
__device__ __forceinline__ std::int32_t held(std::int64_t sum) {
  return static_cast<std::int32_t>(min(sum, std::int64_t{0x7fffffff}));
}

__global__ void __launch_bounds__(threads)
    offsets_kernel(int locals, const std::int32_t* counts, std::int32_t* offsets) {
  __shared__ std::int64_t warp_sums[threads / 32];
  wait_for_predecessor();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  std::int64_t before = 0;  // of all rounds until now
  if (thread == 0) offsets[0] = 0;
  for (int first = 0; first < locals; first += threads) {
    const int e = first + thread;
    std::int64_t upto = e < locals ? max(counts[e], 0) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t below = __shfl_up_sync(all, upto, step);
      if (lane >= step) upto += below;
    }
    if (lane == 31) warp_sums[warp] = upto;
    __syncthreads();
    std::int64_t round = 0;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp) upto += warp_sums[w];
      round += warp_sums[w];
    }
    if (e < locals) offsets[e + 1] = held(before + upto);
    before += round;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(threads)
    counts_kernel(int locals, bool with_all, const std::int32_t* offsets, std::int32_t* counts) {
  wait_for_predecessor();
  let_successor_start();
  for (int e = static_cast<int>(threadIdx.x); e < locals; e += threads) {
    counts[e] = offsets[e + 1] - offsets[e];
  }
  if (with_all && threadIdx.x == 0) counts[locals] = offsets[locals];
}

}  // namespace

void offsets_cuda(const Context& context, int locals, const std::int32_t* counts,
                  std::int32_t* offsets) {
  cuda_engine::launch("offsets_from_counts", context.gpu(), {.block = {threads}}, offsets_kernel,
                      locals, counts, offsets);
}

void counts_cuda(const Context& context, int locals, bool with_all, const std::int32_t* offsets,
                 std::int32_t* counts) {
  cuda_engine::launch("counts_from_offsets", context.gpu(), {.block = {threads}}, counts_kernel,
                      locals, with_all, offsets, counts);
}

}  // namespace shunt
