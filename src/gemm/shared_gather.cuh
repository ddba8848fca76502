// Rows that a permutation picks, for both blocks of a cluster of two: each block copies half of a
// tile's rows into its own shared memory, 16 bytes a lane, and from there to the same place of the
// other block by bulk copies. So a row comes from the L2 once for both, as by a tensor map's
// multicast; a multicast of boxes of one row each takes 46 clocks a row on an H200 and was three
// times slower in all.
//
// Rows lie as a tensor map would leave them: 128 bytes a row, pieces swizzled by the row, as many
// as the tile has in steps of 16. Block 0 has the first half of them, warp 0 a half of that.
#pragma once

#include "gemm/row_pieces.cuh"
#include "gemm/wgmma.cuh"

namespace shunt::cuda_engine {

// Pieces of 16 bytes: a source has fewer.
inline constexpr std::int64_t most_pieces = 0xffffffff;

}  // namespace shunt::cuda_engine

#if defined(SHUNT_SM_90A)

namespace shunt::cuda_engine {

inline constexpr std::uint32_t no_row = 0xffffffff;

// Shared memory to the same place of block `other`; the bytes count at the barrier at `barrier`'s
// place there.
__device__ __forceinline__ void copy_to_rank(std::uint32_t from, std::uint32_t bytes,
                                             std::uint32_t barrier, unsigned other) {
  asm volatile(
      "{\n.reg .b32 to, there;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 there, %2, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %1, "
      "[there];\n}" ::"r"(from),
      "r"(bytes), "r"(barrier), "r"(other)
      : "memory");
}

// Where a block's rows of a tile begin in the source, in pieces of 16 bytes; no_row: zeros. By a
// warp.
template <class Args>
__device__ __forceinline__ void find_sources(const Args& args, std::uint32_t* sources, int row,
                                             int count, int rank, int lane) {
  const int share = (count + 15) / 16 * 8;
#pragma unroll 1
  for (int i = lane; i < share; i += 32) {
    const int at = share * rank + i;
    const int from = at < count ? source_of(args, std::int64_t{row} + at) : -1;
    sources[i] = from < 0 ? no_row
                          : static_cast<std::uint32_t>(from) *
                                static_cast<std::uint32_t>(args.source_row_bytes / 16);
  }
}

// A warp's share of a block's rows: 4 of each 16 of a tile, which has `most` times 16 at most.
template <int most>
class SharedGather {
 public:
  // `rows`: where the tile's rows lie in a block's first stage; `half`: 0 or 1, of two warps.
  __device__ __forceinline__ SharedGather(std::uint32_t rows, int rank, int half, int lane)
      : line_(lane / 8), part_(lane % 8), half_(half), rank_(rank), rows_(rows) {}

  // Sources of a tile of `count` rows, as find_sources() left them.
  __device__ __forceinline__ void begin(const std::uint32_t* sources, int count) {
    boxes_ = (count + 15) / 16;
    first_before_ = first_, bytes_before_ = bytes_;
    const int first = 4 * boxes_ * half_;  // of the block's
    first_ = rows_ + static_cast<std::uint32_t>((8 * boxes_ * rank_ + first) * 128);
    bytes_ = static_cast<unsigned>(4 * boxes_ * 128);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      from_[i] = i < boxes_ ? sources[first + 4 * i + line_] : no_row;
    }
    // Rows 8 n to 8 n + 7 share a pattern: in turn this lane's is row line_ or line_ + 4 of it.
    const std::uint32_t line = first_ + static_cast<std::uint32_t>(line_ * 128);
    const int odd = boxes_ * half_ % 2;
    to_[0] = line + static_cast<std::uint32_t>(16 * (part_ ^ (4 * odd + line_)));
    to_[1] = line + static_cast<std::uint32_t>(16 * (part_ ^ (4 * (1 - odd) + line_)));
  }
  // Orders 64 columns from byte `k` of a row on, for the stage `at` bytes behind the first.
  template <class Args>
  __device__ __forceinline__ void order(const Args& args, std::uint32_t at, std::int64_t k) const {
    const char* const from = args.source + k + 16 * part_;
    const bool inside = k + 16 * part_ < args.k_bytes;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= boxes_) break;
      const bool some = inside && from_[i] != no_row;
      cp_async_16(to_[i % 2] + at + static_cast<std::uint32_t>(4 * 128 * i),
                  some ? from + std::uint64_t{from_[i]} * 16 : args.source, some ? 16 : 0);
    }
    cp_async_commit();
  }
  // What has landed, of this tile or of the one before, goes to the other block, and counts here as
  // an arrival at `full`. By the warp.
  __device__ __forceinline__ void pass_on(std::uint32_t at, bool of_tile_before,
                                          std::uint64_t* full, int lane) const {
    fence_for_async();  // the rows came by generic copies
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(full);
      copy_to_rank((of_tile_before ? first_before_ : first_) + at,
                   of_tile_before ? bytes_before_ : bytes_, shared_address(full),
                   static_cast<unsigned>(rank_) ^ 1);
    }
  }

 private:
  int line_, part_, half_, rank_;
  std::uint32_t rows_;
  int boxes_ = 0;
  std::uint32_t first_ = 0, first_before_ = 0, to_[2] = {};  // of the first stage
  unsigned bytes_ = 0, bytes_before_ = 0;
  std::uint32_t from_[most];
};

}  // namespace shunt::cuda_engine

#endif
