// The prepared layout of weights on the GPU, one source of truth.
//
// f32: a group is a dense matrix of rows along k, each row padded with zeros to a multiple of 16
// bytes. 16 bits: a group is cut into tiles of 128 rows by 64 along k, 16 KB each, those of the
// same rows one after the other: a kernel streams whole tiles by bulk copies, and memory sees one
// long read. Within a tile a row is 128 bytes, its 16-byte pieces exchanged by the row as the
// tensor cores want them (the 128-byte swizzle): piece p of row r lies at p ^ (r % 8). Tiles are
// filled up with zeros.
// Plain: row j of the layout is row j of the matrix [n, k]. Paired, for a gated activation: blocks
// of 8 rows of gate and the same 8 of up take turns (gate, up, gate, up, ..), so that neighbouring
// accumulator tiles of 8 columns hold both sides of an element in one thread. Rows past the end are
// zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/tensor.hpp"

#ifdef __CUDACC__
#define SHUNT_BOTH __host__ __device__
#else
#define SHUNT_BOTH
#endif

namespace shunt::cuda_engine {

struct RowLayout {
  DType dtype = DType::f32;
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  static constexpr std::int64_t tile_rows = 128, tile_k = 64;

  SHUNT_BOTH std::int64_t element_bytes() const { return dtype == DType::f32 ? 4 : 2; }
  // Columns of the product after a gated activation, or n.
  SHUNT_BOTH std::int64_t out_columns() const { return paired ? n / 2 : n; }
  SHUNT_BOTH std::int64_t rows() const { return paired ? (n / 2 + 7) / 8 * 16 : n; }
  SHUNT_BOTH bool tiled() const { return dtype != DType::f32; }
  SHUNT_BOTH std::int64_t steps() const { return (k + tile_k - 1) / tile_k; }
  SHUNT_BOTH std::int64_t row_tiles() const { return (rows() + tile_rows - 1) / tile_rows; }
  // With what fills up: numbers of rows and along k, and bytes.
  SHUNT_BOTH std::int64_t padded_rows() const { return tiled() ? row_tiles() * tile_rows : rows(); }
  SHUNT_BOTH std::int64_t padded_k() const {
    return tiled() ? steps() * tile_k : row_bytes() / element_bytes();
  }
  SHUNT_BOTH std::int64_t row_bytes() const { return (k * element_bytes() + 15) / 16 * 16; }
  SHUNT_BOTH std::int64_t group_bytes() const {
    return padded_rows() * padded_k() * element_bytes();
  }
  // Where number k of row `at` lies in its group, in elements.
  SHUNT_BOTH std::int64_t element(std::int64_t at, std::int64_t number) const {
    if (!tiled()) return at * padded_k() + number;
    return ((at / tile_rows * steps() + number / tile_k) * tile_rows + at % tile_rows) * tile_k +
           (number % tile_k / 8 ^ at % 8) * 8 + number % 8;
  }
  // Which row of the matrix is row `at` of the layout, gate's rows before up's; -1: none.
  SHUNT_BOTH std::int64_t source(std::int64_t at) const {
    if (!paired) return at < n ? at : -1;
    const std::int64_t row = at / 16 * 8 + at % 8;
    if (row >= n / 2) return -1;
    return at % 16 < 8 ? row : n / 2 + row;
  }
};

}  // namespace shunt::cuda_engine
