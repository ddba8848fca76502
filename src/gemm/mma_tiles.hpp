// The tiles of mma_rows.cu, for the kernel and for its cost model.
#pragma once

namespace shunt::cuda_engine {

struct MmaTiles {
  int tokens, weights;  // rows of either
  int pieces;           // of 16 bytes along k that a step has
  int warps, down;      // and those of them along the tokens
  int stages;           // steps in shared memory
  int blocks;           // that a multiprocessor has registers for
  // 64 of k, and a tile's end, on a multiprocessor whose blocks are all at work.
  int step_clocks, end_clocks;
  int shared_bytes = stages * (tokens + weights) * 16 * pieces;  // of a block
};

// No block has more than 99 KB, what 8.6 and 8.9 give one.
inline constexpr MmaTiles mma_tiles[] = {
    {16, 128, 8, 4, 1, 4, 3, 500, 50},
    {64, 128, 4, 4, 2, 5, 3, 900, 3500},
    {128, 256, 4, 8, 2, 4, 1, 2500, 8000},
};

}  // namespace shunt::cuda_engine
