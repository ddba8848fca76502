// The prepared layout of fp8 weights on the GPU, one source of truth.
//
// Rows stand in the order of cuda_layout.hpp (gate and up in blocks of 8 where they are paired). A
// group is cut into tiles of 128 rows by 128 along k, 16 KB each, those of the same rows one after
// the other. Within a tile a row is 128 bytes, its 16-byte pieces exchanged by the row as the
// tensor cores want them: piece p of row r lies at p ^ (r % 8). Tiles are filled up with zeros.
// Behind a group's tiles lie its scales, f32: fp8_block: four numbers a tile, of the rows of gate,
// of those of up, and two zeros (not paired: the same number twice, and zeros); else one a row,
// those of no row 0.
#pragma once

#include <cstdint>

#include "gemm/cuda_layout.hpp"
#include "shunt/format.hpp"

namespace shunt::cuda_engine {

struct PackedLayout {
  Format format = Format::fp8_block;
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  static constexpr std::int64_t tile_rows = 128, tile_k = 128, tile_bytes = tile_rows * tile_k;

  SHUNT_BOTH RowLayout order() const { return {DType::bf16, n, k, paired}; }
  SHUNT_BOTH bool block_scales() const { return format == Format::fp8_block; }
  SHUNT_BOTH std::int64_t rows() const { return order().rows(); }
  SHUNT_BOTH std::int64_t out_columns() const { return order().out_columns(); }
  SHUNT_BOTH std::int64_t steps() const { return (k + tile_k - 1) / tile_k; }
  SHUNT_BOTH std::int64_t row_tiles() const { return (rows() + tile_rows - 1) / tile_rows; }
  // Where in a group a weight's byte lies, and its scales.
  SHUNT_BOTH std::int64_t byte(std::int64_t row, std::int64_t at) const {
    return (row / tile_rows * steps() + at / tile_k) * tile_bytes + row % tile_rows * tile_k +
           (at % tile_k / 16 ^ row % 8) * 16 + at % 16;
  }
  SHUNT_BOTH std::int64_t scales_at() const { return row_tiles() * steps() * tile_bytes; }
  SHUNT_BOTH std::int64_t scale_count() const {
    return block_scales() ? row_tiles() * steps() * 4 : row_tiles() * tile_rows;
  }
  SHUNT_BOTH std::int64_t group_bytes() const {
    return (scales_at() + scale_count() * 4 + 127) / 128 * 128;
  }
};

}  // namespace shunt::cuda_engine
