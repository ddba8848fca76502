// The group walk of fp8's kernel for many rows: as TileList, but tiles that take longer come first,
// where that does not part what shares weights. Clusters that take tiles in turn so have about as
// many of every kind, whatever sizes groups have.
//
// A group's rows are cut into tall tiles of 2 x `half` rows; what is left is tall too if it is more
// than `half`, else low, and as wide as two columns. First come groups that have tall tiles, in
// bands of 8, within a band column by column, what is left after every two columns of the last
// band: blocks that run at once share weights and rows, and no weights are read from memory again.
// Then the others.
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
    return 4 * (2 * 32 + groups + 1) + 2 * groups;
  }

  // `memory` has bytes(groups). build() follows.
  __device__ TallFirst(void* memory, const GroupWalk& walk, int groups, int columns)
      : sums_(static_cast<int*>(memory)),
        tall_(sums_ + 2 * 32),
        low_(reinterpret_cast<std::uint16_t*>(tall_ + groups + 1)),
        walk_(walk),
        groups_(groups),
        columns_(columns),
        wide_((columns + 1) / 2) {}

  // By all threads of a block; ends with a barrier.
  __device__ void build() {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32;
    int tall_before = 0;
    for (int base = 0; base < groups_; base += threads) {
      const int group = base + thread;
      GroupRows mine;
      if (group < groups_) mine = walk_.of(group);
      const auto rows = static_cast<int>(mine.end - mine.begin);
      const int talls = talls_of(rows);
      const bool alone = talls == 0 && rows > 0;
      int tall = talls == 0 ? 0 : talls * columns_ + (rows > 2 * half * talls ? wide_ : 0);
      int low = alone ? 1 : 0;
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
        if (w == warp) tall += tall_before + all_tall, low += lows_ + all_low;
        all_tall += sums_[w], all_low += sums_[32 + w];
      }
      tall_before += all_tall, lows_ += all_low;
      if (group < groups_) tall_[group + 1] = tall;
      if (alone) low_[low - 1] = static_cast<std::uint16_t>(group);
      __syncthreads();
    }
    if (thread == 0) tall_[0] = 0;
    __syncthreads();
  }
  __device__ int tiles() const { return tall_[groups_] + wide_ * lows_; }

  // By all lanes of a warp, for 0 <= number < tiles().
  __device__ GroupTile find(int number) const {
    if (number >= tall_[groups_]) {
      number -= tall_[groups_];
      const int nth = number / wide_, group = low_[nth];
      const GroupRows mine = walk_.of(group);
      const int begin = static_cast<int>(mine.begin);
      return tile_of(group, begin, static_cast<int>(mine.end) - begin, number - nth * wide_);
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Behind the last entry that is not above `number` lies a group with tiles.
    const auto last_upto = [&](int from, int step) {
      const int at = from + lane * step;
      const unsigned upto =
          __ballot_sync(0xffffffffu, at < groups_ && tall_[min(at, groups_)] <= number);
      return from + (31 - __clz(static_cast<int>(upto))) * step;
    };
    const int group = last_upto(last_upto(0, 32), 1);
    const GroupRows mine = walk_.of(group);
    const int begin = static_cast<int>(mine.begin), rows = static_cast<int>(mine.end) - begin;
    const int local = number - tall_[group], down = talls_of(rows), last = (down - 1) / band;
    const int nth = min(local / (band * columns_), last), place = local - nth * (band * columns_);
    const int high = min(band, down - nth * band), rest = rows - 2 * half * down;
    int column = 0, in = place;  // of the columns from there on
    if (rest > 0 && nth == last) {
      const int two = 2 * high + 1, pair = place / two;
      column = 2 * pair, in = place - pair * two;
      if (in >= high * min(2, columns_ - column)) {
        return tile_of(group, begin + 2 * half * down, rest, pair);
      }
    }
    const int further = in / high, row = 2 * half * (nth * band + in - further * high);
    return tile_of(group, begin + row, min(2 * half, rows - row), column + further);
  }

 private:
  __device__ static GroupTile tile_of(int group, int row, int count, int column) {
    return {.group = group, .row = row, .count = static_cast<short>(count), .column = column};
  }
  __device__ static int talls_of(int rows) { return (rows + half - 1) / (2 * half); }

  int* sums_;           // [2][32] of warps
  int* tall_;           // [groups + 1] tiles of groups with tall ones, before each group
  std::uint16_t* low_;  // [groups] those without, but for empty ones
  int lows_ = 0;        // how many of them
  const GroupWalk& walk_;
  int groups_;
  int columns_, wide_;  // of tall tiles, of low ones
};

}  // namespace shunt::cuda_engine
