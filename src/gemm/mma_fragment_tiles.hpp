// The tiles of mma_fragments.cuh, for the kernel and for its cost model.
#pragma once

namespace shunt::cuda_engine {

// Rows of a tile. `looked_up`: dense3's numbers take 64 KB of a block's shared memory.
constexpr int mma_fragment_tokens(bool many, bool looked_up) {
  return !many ? 16 : looked_up ? 32 : 64;
}
// Blocks that a multiprocessor has registers for.
constexpr int mma_fragment_blocks(int tokens) { return tokens == 16 ? 4 : 2; }

// Of a block's shared memory, beside lists of a tile's rows.
inline constexpr int mma_fragment_bytes = 98 * 1024;
// Steps in shared memory, where beside them lie `others` bytes.
constexpr int mma_fragment_stages(int stage_bytes, int others) {
  const int room = (mma_fragment_bytes - others) / stage_bytes;
  return room < 3 ? room : 3;
}

}  // namespace shunt::cuda_engine
