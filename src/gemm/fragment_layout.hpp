// The prepared layout of packed weights that are multiplied with 16-bit rows on the GPU, one source
// of truth for what writes it on the host and for the kernels.
//
// Rows stand in the order of cuda_layout.hpp (gate and up in blocks of 8 where they are paired). A
// group is cut into tiles of 128 rows by 128 along k, those of the same rows one after the other.
// A tile holds codes, the positions of sparse ones, scales and zero points, all in the order in
// which threads of mma.m16n8k16 (and of wgmma with A in registers, which is the same) want them:
//   fragment   16 rows by 16 of k, in a tile numbered (row / 16, k / 16). Lane l has of it four
//              registers: register r holds row 8 (r % 2) + l / 4, k 8 (r / 2) + 2 (l % 4) in its
//              low and the next k in its high half
//   codes      of two fragments along k a lane has 8 bytes together, or 16 of 8-bit codes, lane
//              after lane. dense3: a word, lane after lane, then half a word
//   sparse     the same of the values kept: column c of those is one of k 4 (c / 2) .. + 3. Behind
//              them the positions as mma.sp takes them, a word a lane for 16 rows and 64 of k:
//              lanes 4 q and 4 q + 1 have the first 32 of k, the other two the next; the even ones
//              the first 16 of them; row q in the low half, row q + 8 in the high
//   scales     for 16 rows and each q of 8: those of row q, then those of row q + 8, along k
//   zeros      likewise, of int4, nibbles
// How the codes' bits lie in their words, and what scales are encoded as, says fragment_codes.hpp.
// Tiles are filled up with what counts as zero. Behind a group's tiles lies one f32 a row, which a
// sum is multiplied with at its end; behind those, of an ordered format, i32 [k]: which k stands at
// each place (k_order.hpp).
#pragma once

#include <cstdint>

#include "gemm/cuda_layout.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {

enum class Codes : std::int32_t { nvfp4, mxfp4, sparse, int4, int8, fp8, fp8_block, mxfp8, dense3 };

SHUNT_BOTH constexpr bool eight_bits(Codes codes) {
  return codes == Codes::int8 || codes == Codes::fp8 || codes == Codes::fp8_block ||
         codes == Codes::mxfp8;
}
// Blocks of 32 with a power of two.
SHUNT_BOTH constexpr bool mx(Codes codes) { return codes == Codes::mxfp4 || codes == Codes::mxfp8; }

// Of a tile, in bytes: where each part begins, and all of it.
struct TileParts {
  int positions = 0, scales = 0, zeros = 0, bytes = 0;
};
// `groups`: of scales along k of a row of a tile, only of int4: 8, 4, 2 or 1.
SHUNT_BOTH constexpr TileParts tile_parts(Codes codes, int groups) {
  const int values = codes == Codes::sparse   ? 4096
                     : codes == Codes::dense3 ? 6144
                     : eight_bits(codes)      ? 16384
                                              : 8192;
  TileParts parts{values, values + (codes == Codes::sparse ? 2048 : 0), 0, 0};
  const int scales = codes == Codes::nvfp4 || codes == Codes::sparse ? 1024
                     : mx(codes) || codes == Codes::dense3           ? 512
                     : codes == Codes::int4                          ? 256 * groups
                     : codes == Codes::fp8_block                     ? 16
                                                                     : 0;
  parts.zeros = parts.scales + scales;
  parts.bytes = parts.zeros + (codes == Codes::int4 ? 64 * groups : 0);
  return parts;
}

struct FragmentLayout {
  FormatSpec format{};        // resolved()
  DType dtype = DType::bf16;  // or f16: of rows, what codes are decoded to
  std::int64_t n = 0;         // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  static constexpr int tile_rows = 128, tile_k = 128;

  constexpr Codes codes() const {
    switch (format.format) {
      case Format::nvfp4:
        return Codes::nvfp4;
      case Format::mxfp4:
        return Codes::mxfp4;
      case Format::sparse_nvfp4:
        return Codes::sparse;
      case Format::int4:
        return Codes::int4;
      case Format::int8:
        return Codes::int8;
      case Format::fp8_block:
        return Codes::fp8_block;
      case Format::mxfp8:
        return Codes::mxfp8;
      case Format::dense3:
        return Codes::dense3;
      default:
        return Codes::fp8;
    }
  }
  constexpr int groups() const {
    if (format.format != Format::int4) return 0;
    return format.group % 128 == 0  ? 1
           : format.group % 64 == 0 ? 2
           : format.group % 32 == 0 ? 4
                                    : 8;
  }
  TileParts parts() const { return tile_parts(codes(), groups()); }

  RowLayout order() const { return {DType::bf16, n, k, paired}; }
  std::int64_t rows() const { return order().rows(); }
  std::int64_t out_columns() const { return order().out_columns(); }
  std::int64_t steps() const { return (k + tile_k - 1) / tile_k; }
  std::int64_t row_tiles() const { return (rows() + tile_rows - 1) / tile_rows; }
  // Of a group.
  std::int64_t tile(std::int64_t row, std::int64_t at) const {
    return (row / tile_rows * steps() + at / tile_k) * parts().bytes;
  }
  std::int64_t factors_at() const { return row_tiles() * steps() * parts().bytes; }
  std::int64_t order_at() const { return factors_at() + row_tiles() * tile_rows * 4; }
  std::int64_t group_bytes() const {
    return (order_at() + (format.ordered ? 4 * k : 0) + 127) / 128 * 128;
  }
};

// Where a value of a tile lies among fragments: row 0 .. 127, column 0 .. 127 (of sparse ones those
// kept: 0 .. 63).
struct FragmentPlace {
  int block, fragment;  // row / 16, column / 16
  int lane, reg, half;
};
SHUNT_BOTH constexpr FragmentPlace fragment_place(int row, int column) {
  return {row / 16, column / 16, row % 8 * 4 + column % 8 / 2, column % 16 / 8 * 2 + row % 16 / 8,
          column % 2};
}
SHUNT_BOTH constexpr int row_of(const FragmentPlace& at) {
  return at.block * 16 + at.reg % 2 * 8 + at.lane / 4;
}
SHUNT_BOTH constexpr int column_of(const FragmentPlace& at) {
  return at.fragment * 16 + at.reg / 2 * 8 + at.lane % 4 * 2 + at.half;
}

// Pairs of fragments of 16 rows of a tile, the bytes of a lane's part of one, and its offset; of
// dense3 its word's, behind all of which the halves lie.
SHUNT_BOTH constexpr int pairs_of(Codes codes) { return codes == Codes::sparse ? 2 : 4; }
SHUNT_BOTH constexpr int lane_bytes(Codes codes) {
  return codes == Codes::dense3 ? 6 : eight_bits(codes) ? 16 : 8;
}
SHUNT_BOTH constexpr int codes_at(Codes codes, int block, int pair, int lane) {
  return (block * pairs_of(codes) + pair) * 32 * lane_bytes(codes) +
         lane * (codes == Codes::dense3 ? 4 : lane_bytes(codes));
}
SHUNT_BOTH constexpr int dense3_half_at(int block, int pair, int lane) {
  return codes_at(Codes::dense3, block, pair, 32) + 2 * lane;
}
// Of the word of positions, from where they begin.
SHUNT_BOTH constexpr int positions_at(int block, int half, int lane) {
  return ((block * 2 + half) * 32 + lane) * 4;
}
// Of the scales of rows q and q + 8 of a block, `bytes` a row, from where they begin.
SHUNT_BOTH constexpr int scales_at(int block, int q, int bytes) {
  return (block * 8 + q) * 2 * bytes;
}

}  // namespace shunt::cuda_engine
