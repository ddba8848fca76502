// Grouped GEMM of NVFP4 weights with rows in NVFP4 on a B200 (sm_100a), both multiplied as they are
// by `tcgen05.mma kind::mxf4nvf4`: how tiles, scales and descriptors lie, the packing on the host,
// and the product. blackwell_fp4.hpp says how rows are packed, and which weights are sparse.
//
// A group's rows stand in the order of cuda_layout.hpp and are cut into tiles of 128 by 256 along
// k: 16 KB of codes, rows of 128 bytes whose 16-byte pieces are exchanged by the row (the 128-byte
// swizzle), and behind them 2 KB of scales, a block of 512 bytes for each 64 of k. Tiles of the
// same rows follow one another; behind all tiles of a group lie two f32, the global scales of gate
// (or of the only matrix) and up. What fills up is zero.
//
// In a block of scales those of row r lie at 16 (r % 32) + 4 (r / 32), four bytes for 64 of k: as
// tcgen05.cp brings it to tensor memory, row r's word is in lane r % 32 (of each warp's 32) and
// column r / 32, where the product wants it.
//
// Sparse: 8 KB of the codes that are kept, rows of 64 bytes swizzled within these; 2 KB of
// positions, 16 bytes a row, four bits for eight of k, ascending (in tensor memory row r's lie in
// lane r); 1 KB of scales, each for 32 of k and a block for 128.
#pragma once

#include <cstdint>

#include "cuda/tcgen05_words.hpp"
#include "gemm/blackwell_fp4.hpp"

namespace shunt::cuda_engine {

struct Fp4Tiles {
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  bool sparse = false;
  static constexpr std::int64_t tile_rows = 128, tile_k = 256;

  SHUNT_BOTH constexpr int scaled_k() const { return sparse ? 32 : 16; }  // a scale is for so many
  SHUNT_BOTH constexpr std::int64_t code_bytes() const {
    return tile_rows * tile_k / (sparse ? 4 : 2);
  }
  SHUNT_BOTH constexpr std::int64_t scales_in_tile() const {
    return code_bytes() + (sparse ? tile_rows * tile_k / 16 : 0);
  }
  SHUNT_BOTH constexpr std::int64_t tile_bytes() const {
    return scales_in_tile() + tile_rows * tile_k / scaled_k();
  }

  SHUNT_BOTH RowLayout order() const { return {DType::bf16, n, k, paired}; }
  SHUNT_BOTH std::int64_t rows() const { return order().rows(); }
  SHUNT_BOTH std::int64_t out_columns() const { return order().out_columns(); }
  SHUNT_BOTH std::int64_t columns() const { return (rows() + tile_rows - 1) / tile_rows; }
  SHUNT_BOTH std::int64_t steps() const { return (k + tile_k - 1) / tile_k; }
  SHUNT_BOTH std::int64_t globals_at() const { return columns() * steps() * tile_bytes(); }
  SHUNT_BOTH std::int64_t group_bytes() const { return globals_at() + 128; }
};

// Of a tile, of weights or of rows: the byte of the code of (row, k), k % 2 its nibble.
SHUNT_BOTH constexpr int fp4_code_at(int row, int k) {
  return row * 128 + (k / 32 ^ row % 8) * 16 + k / 2 % 16;
}
// Of a sparse tile: the byte of kept code `i` of a row, i % 2 its nibble, four for eight of k.
SHUNT_BOTH constexpr int fp4_kept_at(int row, int i) {
  return row * 64 + (i / 32 ^ row / 2 % 4) * 16 + i / 2 % 16;
}
// Of a tile's scales, each for `scaled` of k: the byte of (row, k). `blocks` of 128 rows lie side
// by side for every four scales along k.
SHUNT_BOTH constexpr int fp4_scale_at(int row, int k, int blocks, int scaled) {
  return (k / (4 * scaled) * blocks + row / 128) * 512 + row % 32 * 16 + row / 32 % 4 * 4 +
         k / scaled % 4;
}

// A stage of the kernel's ring, and what it does with it.
template <bool sparse>
struct Fp4Stage {
  static constexpr Fp4Tiles tiles{.sparse = sparse};
  static constexpr unsigned products = sparse ? 2 : 4;  // along k
  static constexpr unsigned unit = 64, most_units = 3;  // of rows
  static constexpr unsigned weight_bytes = static_cast<unsigned>(tiles.tile_bytes());
  static constexpr unsigned unit_bytes = unit * static_cast<unsigned>(Fp4Tiles::tile_k) / 2;
  static constexpr int scale_blocks = 2;  // of 128 rows, for each product
  static constexpr unsigned rows_at = weight_bytes;
  static constexpr unsigned scales_at = rows_at + most_units * unit_bytes;
  static constexpr unsigned bytes = scales_at + products * scale_blocks * 512;
  // Columns of tensor memory: two tiles of sums, then a stage's scales, and positions.
  static constexpr unsigned half = most_units * unit;
  static constexpr unsigned weight_scales = 2 * half, row_scales = weight_scales + 4 * products,
                            positions = row_scales + 8 * products;
  static_assert(rows_at % 1024 == 0 && bytes % 1024 == 0 && positions + 4 <= 512);

  // The stage at `base` of shared memory, for a multiple of `unit` columns: copy(column of tensor
  // memory, descriptor) of scales, copy_positions(the same) where there are some, then, for number
  // k along k, product(weights, rows, columns of the scales of each, column of positions, k).
  template <class Copy, class CopyPositions, class Product>
  SHUNT_BOTH static void multiply(std::uint32_t base, unsigned columns, const Copy& copy,
                                  const CopyPositions& copy_positions, const Product& product) {
    const std::uint32_t of_weights = base + static_cast<unsigned>(tiles.scales_in_tile());
    if constexpr (sparse) {
      copy_positions(positions,
                     tcgen05_scale_descriptor(base + static_cast<unsigned>(tiles.code_bytes())));
    }
    for (unsigned k = 0; k < products; ++k) {
      copy(weight_scales + 4 * k, tcgen05_scale_descriptor(of_weights + 512 * k));
      for (unsigned b = 0; b < (columns + 127) / 128; ++b) {
        copy(row_scales + 8 * k + 4 * b,
             tcgen05_scale_descriptor(base + scales_at + 512 * (scale_blocks * k + b)));
      }
    }
    const std::uint64_t weights =
        sparse ? tcgen05_narrow_descriptor(base) : tcgen05_descriptor(base);
    const std::uint64_t rows = tcgen05_descriptor(base + rows_at);
    for (unsigned k = 0; k < products; ++k) {
      product(weights + std::uint64_t{2} * k, rows + std::uint64_t{8 / products} * k,
              weight_scales + 4 * k, row_scales + 8 * k, positions + 2 * k, k);
    }
  }
};

// One group from its NVFP4 matrix (layout.sparse: sparse_nvfp4 that fp4_pairs_support takes), or
// its two where the layout is paired; group_bytes at `to`.
void lay_out_fp4_tiles(const Fp4Tiles& layout, const PackedMatrix& gate, const PackedMatrix* up,
                       char* to);

// The exact weights of row `row` (gate's before up's) of a group at `from`: to[k].
void read_fp4_tiles_row(const Fp4Tiles& layout, const char* from, std::int64_t row, double* to);

using Fp4TileProduct = Fp4ProductOf<Fp4Tiles>;
// Enqueues the product. False, and nothing is enqueued: not a GPU of compute capability 10.0, not
// built for it, k = 0, more than 1024 groups, sizes past 2^31, or no tensor map for the rows.
bool multiply_fp4_tiles(const Gpu& gpu, const Fp4TileProduct& product);

}  // namespace shunt::cuda_engine
