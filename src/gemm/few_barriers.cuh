// The barriers of the kernels for few rows, made while other warps look for their first tile.
#pragma once

#include <cstdint>

#include "cuda/hopper.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// By four threads at once, lane 0 of warps 4-7, which have time: the instruction takes uniform
// addresses, so that lanes would take turns. `filling` arrive at a full stage.
template <int stages>
__device__ __forceinline__ void make_few_barriers(std::uint64_t (&full)[stages],
                                                  std::uint64_t (&empty)[stages],
                                                  std::uint64_t& there, std::uint64_t& used,
                                                  unsigned filling, int split, int warp, int lane) {
  if (warp / 4 == 1 && lane == 0) {
#pragma unroll
    for (int i = 0; i < (stages + 3) / 4; ++i) {
      const int s = 4 * i + warp % 4;
      if (s >= stages) break;
      mbarrier_init(&full[s], filling);
      mbarrier_init(&empty[s], 8);
    }
    if (warp == 4) mbarrier_init(&there, static_cast<unsigned>(8 * split));
    if (warp == 5) mbarrier_init(&used, static_cast<unsigned>(8 * split));
    mbarrier_init_fence();
  }
  __syncwarp();
}

}  // namespace shunt::cuda_engine

#endif
