// Rows that a permutation picks, for both blocks of a cluster of two: each block copies half of a
// tile's rows into its own shared memory, 16 bytes a lane, and from there to the same place of the
// other block by bulk copies. So a row comes from the L2 once for both, as by a tensor map's
// multicast; a multicast of boxes of one row each takes 46 clocks a row on an H200 and was three
// times slower in all.
//
// Rows lie as a tensor map would leave them: 128 bytes a row, pieces swizzled by the row. Of each
// 64 rows of a tile, block `rank` has 32 from 32 rank on.
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
inline constexpr int gathered_each = 32;  // of 64 rows, a block's
inline constexpr int gathered_bytes = gathered_each * 128;

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

// Where a block's rows of a tile begin in the source, in pieces of 16 bytes, 32 for each 64 rows of
// the tile; no_row: zeros. By a warp.
template <class Args>
__device__ __forceinline__ void find_sources(const Args& args, std::uint32_t* sources, int row,
                                             int count, int rank, int lane) {
#pragma unroll 1
  for (int unit = 0; 64 * unit < count; ++unit) {
    const int at = 64 * unit + gathered_each * rank + lane;
    const int from = at < count ? source_of(args, std::int64_t{row} + at) : -1;
    sources[gathered_each * unit + lane] =
        from < 0 ? no_row
                 : static_cast<std::uint32_t>(from) *
                       static_cast<std::uint32_t>(args.source_row_bytes / 16);
  }
}

// A warp's share of a block's rows: 16 of each 32, in `most` units of 64 of a tile.
template <int most>
class SharedGather {
 public:
  // `rows`: where the tile's rows lie in a block's first stage; `half`: 0 or 1, of two warps.
  __device__ __forceinline__ SharedGather(std::uint32_t rows, int rank, int half, int lane)
      : line_(lane / 8),
        part_(lane % 8),
        first_(gathered_each / 2 * half),
        to_(rows + static_cast<std::uint32_t>((gathered_each * rank + first_ + line_) * 128)),
        other_(static_cast<unsigned>(rank) ^ 1) {}

  // Sources of a tile of `count` rows, as find_sources() left them. Returns its units.
  __device__ __forceinline__ int begin(const std::uint32_t* sources, int count) {
    const int units = (count + 63) / 64;
#pragma unroll
    for (int i = 0; i < 4 * most; ++i) {
      from_[i] = no_row;
      if (i / 4 < units) from_[i] = sources[gathered_each * (i / 4) + first_ + 4 * (i % 4) + line_];
    }
    return units;
  }
  // Orders 64 columns from byte `k` of a row on, for the stage `at` bytes behind the first.
  template <class Args>
  __device__ __forceinline__ void order(const Args& args, int units, std::uint32_t at,
                                        std::int64_t k) const {
    const char* const from = args.source + k + 16 * part_;
    const bool inside = k + 16 * part_ < args.k_bytes;
#pragma unroll
    for (int i = 0; i < 4 * most; ++i) {
      if (i / 4 >= units) break;
      const bool some = inside && from_[i] != no_row;
      // Row 4 i + line of 8 that share a pattern.
      const int place = part_ ^ (4 * (i % 2) + line_);
      cp_async_16(to_ + at + static_cast<std::uint32_t>(64 * 128 * (i / 4) + 4 * 128 * (i % 4)) +
                      static_cast<std::uint32_t>(16 * place),
                  some ? from + std::uint64_t{from_[i]} * 16 : args.source, some ? 16 : 0);
    }
    cp_async_commit();
  }
  // What has landed goes to the other block, and counts here as an arrival at `full`. By the warp.
  __device__ __forceinline__ void pass_on(std::uint32_t at, int units, std::uint64_t* full,
                                          int lane) const {
    fence_for_async();  // the rows came by generic copies
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
    if (lane < units) {
      const std::uint32_t first = to_ - static_cast<std::uint32_t>(line_ * 128) + at;
      copy_to_rank(first + static_cast<std::uint32_t>(64 * 128 * lane), gathered_bytes / 2,
                   shared_address(full), other_);
    }
  }

 private:
  int line_, part_, first_;
  std::uint32_t to_;
  unsigned other_;
  std::uint32_t from_[4 * most];
};

}  // namespace shunt::cuda_engine

#endif
