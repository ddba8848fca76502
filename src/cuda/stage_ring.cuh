// Where a warp is in a ring of stages, and the parity of their barriers there.
#pragma once

namespace shunt::cuda_engine {

template <int stages>
struct StageRing {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(int steps) {
    stage += steps;
    parity ^= static_cast<unsigned>(stage / stages) & 1;
    stage %= stages;
  }
  // The stage `steps` back, fewer than there are.
  __device__ __forceinline__ int before(int steps) const {
    return stage >= steps ? stage - steps : stage - steps + stages;
  }
};

}  // namespace shunt::cuda_engine
