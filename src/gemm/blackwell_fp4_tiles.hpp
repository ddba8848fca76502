// Grouped GEMM of NVFP4 weights with rows in NVFP4 on a B200 (sm_100a), both multiplied as they are
// by `tcgen05.mma kind::mxf4nvf4`: how tiles, scales and descriptors lie, the packing on the host,
// and the product. blackwell_fp4.hpp says how rows are packed; weights are dense here.
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
#pragma once

#include <cstdint>

#include "cuda/tcgen05_words.hpp"
#include "gemm/blackwell_fp4.hpp"

namespace shunt::cuda_engine {

struct Fp4Tiles {
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  static constexpr std::int64_t tile_rows = 128, tile_k = 256;
  static constexpr std::int64_t code_bytes = tile_rows * tile_k / 2;
  static constexpr std::int64_t scale_bytes = tile_rows * tile_k / 16;
  static constexpr std::int64_t tile_bytes = code_bytes + scale_bytes;

  SHUNT_BOTH RowLayout order() const { return {DType::bf16, n, k, paired}; }
  SHUNT_BOTH std::int64_t rows() const { return order().rows(); }
  SHUNT_BOTH std::int64_t out_columns() const { return order().out_columns(); }
  SHUNT_BOTH std::int64_t columns() const { return (rows() + tile_rows - 1) / tile_rows; }
  SHUNT_BOTH std::int64_t steps() const { return (k + tile_k - 1) / tile_k; }
  SHUNT_BOTH std::int64_t globals_at() const { return columns() * steps() * tile_bytes; }
  SHUNT_BOTH std::int64_t group_bytes() const { return globals_at() + 128; }
};

// Of a tile, of weights or of rows: the byte of the code of (row, k), k % 2 its nibble.
SHUNT_BOTH constexpr int fp4_code_at(int row, int k) {
  return row * 128 + (k / 32 ^ row % 8) * 16 + k / 2 % 16;
}
// Of a tile's scales: the byte of (row, k). `blocks` of 128 rows lie side by side for each 64 of k.
SHUNT_BOTH constexpr int fp4_scale_at(int row, int k, int blocks) {
  return (k / 64 * blocks + row / 128) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + k / 16 % 4;
}

// A stage of the kernel's ring, and what it does with it.
struct Fp4Stage {
  static constexpr unsigned unit = 64, most_units = 3;  // of rows
  static constexpr unsigned weight_bytes = static_cast<unsigned>(Fp4Tiles::tile_bytes);
  static constexpr unsigned unit_bytes = unit * static_cast<unsigned>(Fp4Tiles::tile_k) / 2;
  static constexpr int scale_blocks = 2;  // of 128 rows, for each 64 of k
  static constexpr unsigned rows_at = weight_bytes;
  static constexpr unsigned scales_at = rows_at + most_units * unit_bytes;
  static constexpr unsigned bytes = scales_at + 4 * scale_blocks * 512;
  // Columns of tensor memory: two tiles of sums, then a stage's scales.
  static constexpr unsigned half = most_units * unit;
  static constexpr unsigned weight_scales = 2 * half, row_scales = weight_scales + 16;
  static_assert(rows_at % 1024 == 0 && bytes % 1024 == 0 && row_scales + 4 * 8 <= 512);

  // The stage at `base` of shared memory, for a multiple of `unit` columns: copy(column of tensor
  // memory, descriptor), then, for number k of 64 along k, product(weights, rows, columns of the
  // scales of each, k).
  template <class Copy, class Product>
  SHUNT_BOTH static void multiply(std::uint32_t base, unsigned columns, const Copy& copy,
                                  const Product& product) {
    const std::uint32_t of_weights = base + static_cast<unsigned>(Fp4Tiles::code_bytes);
    for (unsigned k = 0; k < 4; ++k) {
      copy(weight_scales + 4 * k, tcgen05_scale_descriptor(of_weights + 512 * k));
      for (unsigned b = 0; b < (columns + 127) / 128; ++b) {
        copy(row_scales + 8 * k + 4 * b,
             tcgen05_scale_descriptor(base + scales_at + 512 * (scale_blocks * k + b)));
      }
    }
    const std::uint64_t weights = tcgen05_descriptor(base);
    const std::uint64_t rows = tcgen05_descriptor(base + rows_at);
    for (unsigned k = 0; k < 4; ++k) {
      product(weights + std::uint64_t{2} * k, rows + std::uint64_t{2} * k, weight_scales + 4 * k,
              row_scales + 8 * k, k);
    }
  }
};

// One group from its NVFP4 matrix, or its two where the layout is paired; group_bytes at `to`.
void lay_out_fp4_tiles(const Fp4Tiles& layout, const PackedMatrix& gate, const PackedMatrix* up,
                       char* to);

using Fp4TileProduct = Fp4ProductOf<Fp4Tiles>;
// Enqueues the product. False, and nothing is enqueued: not a GPU of compute capability 10.0, not
// built for it, k = 0, more than 1024 groups, sizes past 2^31, or no tensor map for the rows.
bool multiply_fp4_tiles(const Gpu& gpu, const Fp4TileProduct& product);

}  // namespace shunt::cuda_engine
