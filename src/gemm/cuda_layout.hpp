// The prepared layout of weights on the GPU, one source of truth.
//
// A group is a dense matrix of rows along k, each row padded with zeros to a multiple of 16 bytes:
// what 16-byte copies, ldmatrix and TMA boxes want. Plain: row j of the layout is row j of the
// matrix [n, k]. Paired, for a gated activation: blocks of 8 rows of gate and the same 8 of up take
// turns (gate, up, gate, up, ..), so that neighbouring accumulator tiles of 8 columns hold both
// sides of an element in one thread. Rows past the end are zero.
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

  SHUNT_BOTH std::int64_t element_bytes() const { return dtype == DType::f32 ? 4 : 2; }
  // Columns of the product after a gated activation, or n.
  SHUNT_BOTH std::int64_t out_columns() const { return paired ? n / 2 : n; }
  SHUNT_BOTH std::int64_t rows() const { return paired ? (n / 2 + 7) / 8 * 16 : n; }
  SHUNT_BOTH std::int64_t row_bytes() const { return (k * element_bytes() + 15) / 16 * 16; }
  SHUNT_BOTH std::int64_t group_bytes() const { return rows() * row_bytes(); }
  // Which row of the matrix is row `at` of the layout, gate's rows before up's; -1: none.
  SHUNT_BOTH std::int64_t source(std::int64_t at) const {
    if (!paired) return at < n ? at : -1;
    const std::int64_t row = at / 16 * 8 + at % 8;
    if (row >= n / 2) return -1;
    return at % 16 < 8 ? row : n / 2 + row;
  }
};

}  // namespace shunt::cuda_engine
