// Tiles for clusters of two blocks, each the next one when the cluster is about to need it, instead
// of every clusters-th: multiprocessors differ in how fast they get through tiles, and tiles in
// rows. In shared memory of either block.
//
// A cluster's first tile has its own number. The others' come from a counter in memory, which is
// zero between kernels: block 0 counts, and tells block 1. Every cluster that has a tile counts
// once for each that it has, and whoever is the last to count sets the counter back. The kernel of
// many rows of packed weights, whose clusters may be of one block, counts by itself.
#pragma once

#include "cuda/warp_copies.cuh"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// What block 0 tells block 1 of tiles that it has claimed. Block 0 is ahead of block 1 by fewer
// than `kept`: by as many tiles as a ring has stages at most, since it orders no step into one that
// block 1 has yet to read.
template <unsigned kept>
struct ToldTiles {
  uint2 told[kept];  // block 1's: a tile's number, and which of the cluster's it is

  // By one thread, before the cluster's first barrier.
  __device__ void init() {
    for (auto& one : told) one = make_uint2(0, 0);
  }
  // By one thread of block 0; both words at once.
  __device__ void tell(unsigned number, unsigned nth) {
    asm volatile("st.relaxed.cluster.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(
                     address_of_rank(&told[nth % kept], 1)),
                 "r"(number), "r"(nth)
                 : "memory");
  }
  // By one thread of block 1.
  __device__ unsigned hear(unsigned nth) const {
    unsigned number, heard;
    do {
      asm volatile("ld.relaxed.cluster.shared::cta.v2.b32 {%0, %1}, [%2];"
                   : "=r"(number), "=r"(heard)
                   : "r"(shared_address(&told[nth % kept]))
                   : "memory");
    } while (heard != nth);
    return number;
  }
};

// By who has counted: `counted` before it, of all that count, one a tile. The last sets it back.
__device__ __forceinline__ void end_counting(std::uint32_t* counter, unsigned counted, int tiles) {
  if (counted + 1 == static_cast<unsigned>(tiles)) atomicExch(counter, 0U);
}

// Where one warp orders copies and another finds tiles.
struct TileClaims {
  static constexpr unsigned kept = 16;
  // Steps before a tile's end when the next tile is claimed: late, so that a slow cluster keeps
  // none that it has yet to begin. (In fp8 two and six took the same time.)
  static constexpr int ahead = 6;

  ToldTiles<kept> claimed;
  std::uint64_t wanted;  // a phase a tile

  // By one thread, before the cluster's first barrier.
  __device__ void init() {
    claimed.init();
    mbarrier_init(&wanted, 1);
  }
  // At each step i of a tile's copies by who orders them: one thread, `on`.
  __device__ __forceinline__ void at_step(bool on, int i, int steps) {
    arrive_if(on && i == max(steps - ahead, 0), shared_address(&wanted));
  }
  // By one thread of either block, which has had `before` tiles: the number of the next one, or
  // one that is at least `tiles`.
  __device__ int next(std::uint32_t* counter, int tiles, int clusters, int rank, unsigned before) {
    mbarrier_wait(&wanted, (before - 1) & 1);
    if (rank == 0) {
      const unsigned counted = atomicAdd(counter, 1U);
      end_counting(counter, counted, tiles);
      const unsigned number = static_cast<unsigned>(clusters) + counted;
      claimed.tell(number, before);
      return static_cast<int>(number);
    }
    return static_cast<int>(claimed.hear(before));
  }
};

}  // namespace shunt::cuda_engine

#endif
