// Which tile of which group: row counts of groups are only known on the device, so that every warp
// walks the groups itself, 32 at a time.
#pragma once

#include <cstdint>

#include "gemm/group_walk.hpp"

namespace shunt::cuda_engine {

// Tiles are numbered group by group, within a group column by column of tiles, within a column
// downwards: blocks that run at once share a column's weights. All lanes of a warp must call.
class TileSearch {
 public:
  struct Tile {
    int group = -1;  // -1: there is no such tile
    std::int64_t row = 0, end = 0;
    std::int64_t column = 0;  // of tiles
  };

  __device__ TileSearch(const GroupWalk& walk, int groups, int tile_rows, std::int64_t tile_columns)
      : walk_(walk), groups_(groups), tile_rows_(tile_rows), tile_columns_(tile_columns) {}

  // `number` must not be below that of the call before.
  __device__ Tile find(std::int64_t number) {
    constexpr unsigned all = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    while (first_ < groups_) {
      const int group = first_ + lane;
      GroupRows mine;
      if (group < groups_) mine = walk_.of(group);
      const std::int64_t down = (mine.end - mine.begin + tile_rows_ - 1) / tile_rows_;
      std::int64_t upto = down * tile_columns_;  // becomes the sum over lanes 0 .. lane
      for (int step = 1; step < 32; step *= 2) {
        const std::int64_t below = __shfl_up_sync(all, upto, step);
        if (lane >= step) upto += below;
      }
      const unsigned beyond = __ballot_sync(all, number < before_ + upto);
      if (beyond != 0) {
        const int owner = __ffs(static_cast<int>(beyond)) - 1;
        const std::int64_t tiles_down = __shfl_sync(all, down, owner);
        const std::int64_t local =
            number - before_ - (__shfl_sync(all, upto, owner) - tiles_down * tile_columns_);
        const std::int64_t begin = __shfl_sync(all, mine.begin, owner);
        return {first_ + owner, begin + local % tiles_down * tile_rows_,
                __shfl_sync(all, mine.end, owner), local / tiles_down};
      }
      before_ += __shfl_sync(all, upto, 31);
      first_ += 32;
    }
    return {};
  }

 private:
  const GroupWalk& walk_;
  int groups_;
  int tile_rows_;
  std::int64_t tile_columns_;
  int first_ = 0;            // of the 32 groups at hand
  std::int64_t before_ = 0;  // tiles of all groups before them
};

}  // namespace shunt::cuda_engine
