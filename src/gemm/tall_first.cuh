// The group walk of fp8's kernel for many rows: as TileList, but tall tiles of all groups come
// first, then the low ones. Clusters that take tiles in turn so have as many of either, within one,
// whatever sizes groups have.
//
// A group's rows are cut into tall tiles of 2 x `half` rows; what is left is tall too if it is more
// than `half`, else low. Tall tiles of a group are numbered in bands of 8, within a band column by
// column: blocks that run at once share weights and rows. A low tile is as wide as two columns.
#pragma once

#include <cstdint>

#include "gemm/group_walk.hpp"
#include "gemm/tile_list.cuh"

namespace shunt::cuda_engine {

template <int half>
class TallFirst {
 public:
  static constexpr int band = 8;
  __host__ __device__ static constexpr int bytes(int groups) {
    return 4 * (2 * 32 + 2 * (groups + 1));
  }

  // `memory` has bytes(groups). build() follows.
  __device__ TallFirst(void* memory, const GroupWalk& walk, int groups, int columns)
      : sums_(static_cast<int*>(memory)),
        tall_(sums_ + 2 * 32),
        low_(tall_ + groups + 1),
        walk_(walk),
        groups_(groups),
        columns_(columns),
        wide_((columns + 1) / 2) {}

  // By all threads of a block; ends with a barrier.
  __device__ void build() {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32;
    int tall_before = 0, low_before = 0;
    for (int base = 0; base < groups_; base += threads) {
      const int group = base + thread;
      GroupRows mine;
      if (group < groups_) mine = walk_.of(group);
      const int halves = halves_of(static_cast<int>(mine.end - mine.begin));
      int tall = halves / 2 * columns_, low = halves % 2 * wide_;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int tall_below = __shfl_up_sync(0xffffffffu, tall, step);
        const int low_below = __shfl_up_sync(0xffffffffu, low, step);
        if (lane >= step) tall += tall_below, low += low_below;
      }
      if (lane == 31) sums_[warp] = tall, sums_[32 + warp] = low;
      __syncthreads();
      int all_tall = 0, all_low = 0;
      for (int w = 0; w < threads / 32; ++w) {
        if (w == warp) tall += tall_before + all_tall, low += low_before + all_low;
        all_tall += sums_[w], all_low += sums_[32 + w];
      }
      tall_before += all_tall, low_before += all_low;
      if (group < groups_) tall_[group + 1] = tall, low_[group + 1] = low;
      __syncthreads();
    }
    if (thread == 0) tall_[0] = low_[0] = 0;
    __syncthreads();
  }
  __device__ int tiles() const { return tall_[groups_] + low_[groups_]; }

  // By all lanes of a warp, for 0 <= number < tiles().
  __device__ GroupTile find(int number) const {
    const bool low = number >= tall_[groups_];
    if (low) number -= tall_[groups_];
    const int* const first = low ? low_ : tall_;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Behind the last entry that is not above `number` lies a group with tiles.
    const auto last_upto = [&](int from, int step) {
      const int at = from + lane * step;
      const unsigned upto =
          __ballot_sync(0xffffffffu, at < groups_ && first[min(at, groups_)] <= number);
      return from + (31 - __clz(static_cast<int>(upto))) * step;
    };
    const int group = last_upto(last_upto(0, 32), 1);
    const GroupRows mine = walk_.of(group);
    const int begin = static_cast<int>(mine.begin), rows = static_cast<int>(mine.end) - begin;
    const int local = number - first[group], down = halves_of(rows) / 2;
    if (low) return {group, begin + 2 * half * down, rows - 2 * half * down, local};
    const int nth = local / (band * columns_), place = local - nth * (band * columns_);
    const int high = min(band, down - nth * band), column = place / high;
    const int row = 2 * half * (nth * band + place - column * high);
    return {group, begin + row, min(2 * half, rows - row), column};
  }

 private:
  __device__ static int halves_of(int rows) { return (rows + half - 1) / half; }

  int* sums_;  // [2][32] of warps
  int* tall_;  // [groups + 1] tall tiles before each group
  int* low_;   // [groups + 1] low ones
  const GroupWalk& walk_;
  int groups_;
  int columns_, wide_;  // of tall tiles, of low ones
};

}  // namespace shunt::cuda_engine
