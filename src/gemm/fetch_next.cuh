// What a block of one product fetches for the product that follows.
#pragma once

#include <cstdint>

#include "cuda/hopper.cuh"
#include "gemm/few_chain.hpp"

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

// To the L2; both multiples of 16 bytes.
__device__ __forceinline__ void fetch_bytes(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// By all lanes of a warp that has ordered its last weights, one of a block: into the L2 what the
// next product's blocks will begin with, a tile or `most` bytes of it for each of the `active`
// blocks that have tiles. Where the next product's blocks find room while this grid runs, theirs
// are under way already. A grid of few tiles has nothing to spare: with 1.5 and 2.9 tiles a block
// it ended later for it.
template <class List>
__device__ __forceinline__ void fetch_next(const FewChain& chain, const List& list, int columns,
                                           int active, int most, int lane) {
  constexpr int least_tiles = 3;  // of a block
  constexpr int piece = 16 * 1024;
  const NextWeights& next = chain.next;
  const int block = static_cast<int>(blockIdx.x), tiles = list.tiles();
  if (next.tiles == nullptr || block >= active || tiles < least_tiles * active) return;
  const int number = max(chain.at_once - active, 0) + block;
  const int row_tile = number / next.columns;
  if (number >= chain.at_once || row_tile * columns >= tiles) return;
  const char* const from = next.tiles + list.find(row_tile * columns).group * next.group_bytes +
                           std::int64_t{number - row_tile * next.columns} * next.tile_bytes;
  const int bytes = min(next.tile_bytes, most);
  if (lane == 0) {
#pragma unroll 1
    for (int at = 0; at < bytes; at += piece) {
      fetch_bytes(from + at, static_cast<unsigned>(min(piece, bytes - at)));
    }
  }
  __syncwarp();
}

}  // namespace shunt::cuda_engine

#endif
