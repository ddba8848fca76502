// The group walk of the Hopper kernels: which rows and which columns tile number t has. Row counts
// of groups are only known on the device: a block counts the tiles of all groups once, in shared
// memory, and then every warp finds any tile in two steps.
//
// A group's rows are cut into the fewest tiles of at most `most` units of `unit` rows, as even as
// units allow. Its tiles are numbered in bands of 8 row tiles, within a band column by column:
// blocks that run at once share weights and rows.
#pragma once

#include <cstdint>

#include "gemm/tile_search.cuh"

namespace shunt::cuda_engine {

inline constexpr int most_listed_groups = 1024;

struct GroupTile {
  int group = 0;
  int row = 0;        // the first
  short count = 0;    // of rows
  bool alone = true;  // of its group and column
  int column = 0;     // of tiles
};

template <int unit, int most>
class TileList {
 public:
  static constexpr int band = 8;
  __host__ __device__ static constexpr int bytes(int groups) { return 128 + 4 * (2 * groups + 2); }

  // `memory` has bytes(groups). build() follows, with the same walk.
  __device__ TileList(void* memory, const GroupWalk& walk, int groups, int columns)
      : sums_(static_cast<int*>(memory)),
        first_(sums_ + 32),
        begin_(first_ + groups + 1),
        capacity_(static_cast<int>(walk.capacity)),
        groups_(groups),
        columns_(columns) {}

  // By all threads of a block of up to 32 warps; ends with a barrier.
  __device__ void build(const GroupWalk& walk) {
    build(walk, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 0);
  }
  // By `threads` threads, up to 32 whole warps, of which this is number `thread`; ends with their
  // barrier, number `barrier`.
  __device__ void build(const GroupWalk& walk, int thread, int threads, int barrier) {
    const auto wait = [&] {
      asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    };
    const int lane = thread % 32, warp = thread / 32;
    int before = 0;
    for (int base = 0; base < groups_; base += threads) {
      const int group = base + thread;
      GroupRows mine;
      if (group < groups_) mine = walk.of(group);
      const int count = static_cast<int>(mine.end - mine.begin);
      int upto = row_tiles(count) * columns_;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += below;
      }
      if (lane == 31) sums_[warp] = upto;
      wait();
      int all = 0;
      for (int w = 0; w < threads / 32; ++w) {
        if (w == warp) upto += before + all;
        all += sums_[w];
      }
      before += all;
      if (group < groups_) {
        first_[group + 1] = upto;
        // A group ends where the next one begins, or is empty; where groups have room for a fixed
        // number of rows, it begins there, and how many it has is kept.
        begin_[group] = capacity_ == 0 ? static_cast<int>(mine.begin) : count;
        if (group == groups_ - 1) begin_[groups_] = static_cast<int>(mine.end);
      }
      wait();
    }
    if (thread == 0) first_[0] = 0;
    wait();
  }
  __device__ int tiles() const { return first_[groups_]; }

  // Tile `number` without a list, by all lanes of a warp, while others build one. Group -1: there
  // is none, or too many groups.
  __device__ static GroupTile find_unlisted(const GroupWalk& walk, int groups, int columns,
                                            int number) {
    constexpr int most_each = 8;  // groups of a lane, one after the other
    const int each = (groups + 31) / 32;
    if (each > most_each) return {.group = -1};
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int begin[most_each + 1], sum = 0;
    if (walk.offsets != nullptr) {
      const int all = static_cast<int>(walk.rows);
#pragma unroll
      for (int i = 0; i <= most_each; ++i)
        begin[i] = walk.offsets[min(lane * each + min(i, each), groups)];
#pragma unroll
      for (int i = 0; i <= most_each; ++i) begin[i] = min(max(begin[i], 0), all);
    } else {
      // As if they followed one another: only how many there are is read of these.
      begin[0] = 0;
#pragma unroll
      for (int i = 0; i < most_each; ++i) {
        const int group = lane * each + i;
        GroupRows mine;
        if (i < each && group < groups) mine = walk.of(group);
        begin[i + 1] = begin[i] + static_cast<int>(mine.end - mine.begin);
      }
    }
#pragma unroll
    for (int i = 0; i < most_each; ++i) sum += row_tiles(max(begin[i + 1] - begin[i], 0));
    sum *= columns;
    int before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += below;
    }
    const unsigned beyond = __ballot_sync(0xffffffffu, number < before);
    if (beyond == 0) return {.group = -1};
    const int owner = __ffs(static_cast<int>(beyond)) - 1;
    int local = number - (before - sum), group = lane * each, first = begin[0];
    int size = max(begin[1] - first, 0);
    bool found = local < row_tiles(size) * columns;
#pragma unroll
    for (int i = 1; i < most_each; ++i) {
      if (!found) {
        local -= row_tiles(size) * columns;
        ++group, first = begin[i], size = max(begin[i + 1] - first, 0);
        found = local < row_tiles(size) * columns;
      }
    }
    if (walk.offsets == nullptr) first = group * static_cast<int>(walk.capacity);
    return within(__shfl_sync(0xffffffffu, group, owner), __shfl_sync(0xffffffffu, first, owner),
                  __shfl_sync(0xffffffffu, size, owner), __shfl_sync(0xffffffffu, local, owner),
                  columns);
  }

  // By all lanes of a warp, for 0 <= number < tiles().
  __device__ GroupTile find(int number) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Behind the last entry that is not above `number` lies a group with tiles.
    const auto last_upto = [&](int from, int step) {
      const int at = from + lane * step;
      const unsigned upto =
          __ballot_sync(0xffffffffu, at < groups_ && first_[min(at, groups_)] <= number);
      return from + (31 - __clz(static_cast<int>(upto))) * step;
    };
    const int group = last_upto(last_upto(0, 32), 1);
    const int begin = begin_[group];
    if (capacity_ != 0) {
      return within(group, group * capacity_, begin, number - first_[group], columns_);
    }
    return within(group, begin, max(begin_[group + 1] - begin, 0), number - first_[group],
                  columns_);
  }

 private:
  // Tile `local` of a group.
  __device__ static GroupTile within(int group, int begin, int rows, int local, int columns) {
    const int units = (rows + unit - 1) / unit;
    const int down = row_tiles(rows);
    if (down == 1) return {group, begin, static_cast<short>(rows), true, local};
    const int nth = local / (band * columns), place = local - nth * (band * columns);
    const int high = min(band, down - nth * band);
    const int column = place / high, tile = nth * band + place - column * high;
    const int each = units / down, larger = units - each * down;  // by one unit
    const int row = (tile * each + min(tile, larger)) * unit;
    const int count = min((each + (tile < larger)) * unit, rows - row);
    return {group, begin + row, static_cast<short>(count), false, column};
  }

  __device__ static int row_tiles(int rows) {
    const int units = (rows + unit - 1) / unit;
    return (units + most - 1) / most;
  }

  int* sums_;   // [32] of warps
  int* first_;  // [groups + 1] tiles before each group
  int* begin_;  // [groups + 1]; with a capacity, how many rows a group has
  int capacity_;
  int groups_;
  int columns_;
};

}  // namespace shunt::cuda_engine
