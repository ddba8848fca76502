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
  int row = 0, count = 0;  // the first row, and how many
  int column = 0;          // of tiles
};

template <int unit, int most>
class TileList {
 public:
  static constexpr int band = 8;
  __host__ __device__ static constexpr int bytes(int groups) { return 4 * (3 * groups + 1); }

  // `memory` has bytes(groups). build() follows.
  __device__ TileList(void* memory, int groups, int columns)
      : first_(static_cast<int*>(memory)),
        begin_(first_ + groups + 1),
        rows_(begin_ + groups),
        groups_(groups),
        columns_(columns) {}

  // By all threads of a block of up to 32 warps; ends with a barrier.
  __device__ void build(const std::int32_t* offsets, const std::int32_t* valid, std::int64_t rows) {
    __shared__ int sums[32];
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32;
    int before = 0;
    for (int base = 0; base < groups_; base += threads) {
      const int group = base + thread;
      GroupRows mine;
      if (group < groups_) mine = group_rows(offsets, valid, rows, group);
      const int count = static_cast<int>(mine.end - mine.begin);
      int upto = row_tiles(count) * columns_;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += below;
      }
      if (lane == 31) sums[warp] = upto;
      __syncthreads();
      int all = 0;
      for (int w = 0; w < threads / 32; ++w) {
        if (w == warp) upto += before + all;
        all += sums[w];
      }
      before += all;
      if (group < groups_) {
        first_[group + 1] = upto;
        begin_[group] = static_cast<int>(mine.begin);
        rows_[group] = count;
      }
      __syncthreads();
    }
    if (thread == 0) first_[0] = 0;
    __syncthreads();
  }
  __device__ int tiles() const { return first_[groups_]; }

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
    const int local = number - first_[group], rows = rows_[group];
    const int units = (rows + unit - 1) / unit;
    const int down = row_tiles(rows);
    if (down == 1) return {group, begin_[group], rows, local};
    const int each = (units + down - 1) / down * unit;
    const int nth = local / (band * columns_), within = local - nth * (band * columns_);
    const int high = min(band, down - nth * band);
    const int column = within / high, row = (nth * band + within - column * high) * each;
    return {group, begin_[group] + row, min(each, rows - row), column};
  }

 private:
  __device__ static int row_tiles(int rows) {
    const int units = (rows + unit - 1) / unit;
    return (units + most - 1) / most;
  }

  int* first_;  // [groups + 1] tiles before each group
  int* begin_;
  int* rows_;
  int groups_;
  int columns_;
};

}  // namespace shunt::cuda_engine
