// The counter that a product's tiles are claimed from (tile_claims.cuh).
#pragma once

#include "cuda/runtime.hpp"

namespace shunt::cuda_engine {

inline constexpr int tile_tickets = router_launches + 1;  // of Gpu::tickets: two
static_assert(tile_tickets + 2 <= router_meeting);

// `early`: the kernel before may still count, with the other one.
inline std::uint32_t* tile_counter(const Gpu& gpu, bool early) {
  return gpu.tickets + tile_tickets + (early ? 1 : 0);
}

}  // namespace shunt::cuda_engine
