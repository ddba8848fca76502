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
    {.tokens = 16,
     .weights = 128,
     .pieces = 8,
     .warps = 4,
     .down = 1,
     .stages = 4,
     .blocks = 3,
     .step_clocks = 500,
     .end_clocks = 50},
    {.tokens = 64,
     .weights = 128,
     .pieces = 4,
     .warps = 4,
     .down = 2,
     .stages = 5,
     .blocks = 3,
     .step_clocks = 900,
     .end_clocks = 3500},
    {.tokens = 128,
     .weights = 256,
     .pieces = 4,
     .warps = 8,
     .down = 2,
     .stages = 4,
     .blocks = 1,
     .step_clocks = 2500,
     .end_clocks = 8000},
};

}  // namespace shunt::cuda_engine
