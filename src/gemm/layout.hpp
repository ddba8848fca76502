// The prepared layout of weights, one source of truth: who writes it, who reads it, how many bytes.
//
// A matrix [n, k] is cut into panels of 64 columns of the output (rows of the matrix). A panel
// holds, for one k after the other, what a kernel multiplies with one number of the input:
//   f32   [k][64]
//   f16   [k][64]
//   bf16  [(k + 1) / 2][64][2], two neighbours in k side by side: the order of the bf16 dot
//         product, and of AMX tiles of 16 rows (row stride 256 bytes)
// Paired, for a gated activation: a panel holds 32 columns of gate and the same 32 of up, in blocks
// of 16 that take turns (gate, up, gate, up), so that a kernel has both sides of an element at
// once. Columns past the end and the odd k's partner are zero. A group's panels follow one another,
// and groups too: everything is a multiple of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/gemm.hpp"

namespace shunt {

inline constexpr std::int64_t panel_columns = 64;
inline constexpr std::int64_t column_block = 16;

struct PanelLayout {
  DType dtype = DType::f32;
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  // Not plain: columns and rows are as here, bytes as packed_panels.hpp says; `dtype` is what rows
  // are rounded to.
  FormatSpec format{};

  PanelLayout() = default;
  PanelLayout(DType type, std::int64_t columns, std::int64_t depth, bool pairs)
      : dtype(type), n(columns), k(depth), paired(pairs) {}
  explicit PanelLayout(const PreparedWeights& w) : PanelLayout(w.dtype, w.n, w.k, w.paired) {
    format = w.format;
  }

  // Columns of the product after a gated activation, or n.
  std::int64_t out_columns() const { return paired ? n / 2 : n; }
  // Of those, how many a panel makes.
  std::int64_t panel_out_columns() const { return paired ? panel_columns / 2 : panel_columns; }
  std::int64_t panels() const {
    return (out_columns() + panel_out_columns() - 1) / panel_out_columns();
  }
  // Bytes of `depth` consecutive k of a panel, from an even one.
  std::int64_t chunk_bytes(std::int64_t depth) const {
    return dtype == DType::f32    ? depth * panel_columns * 4
           : dtype == DType::bf16 ? (depth + 1) / 2 * panel_columns * 4
                                  : depth * panel_columns * 2;
  }
  std::int64_t panel_bytes() const { return chunk_bytes(k); }
  std::int64_t group_bytes() const { return panels() * panel_bytes(); }
  // Which row of the matrix is column `column` of panel `panel`, gate's rows before up's when
  // paired; -1: none.
  std::int64_t row(std::int64_t panel, std::int64_t column) const {
    if (!paired) {
      const std::int64_t at = panel * panel_columns + column;
      return at < n ? at : -1;
    }
    const std::int64_t block = column / column_block;
    const std::int64_t at = panel * 32 + block / 2 * column_block + column % column_block;
    if (at >= n / 2) return -1;
    return block % 2 == 0 ? at : n / 2 + at;
  }
};

// Writes k in [begin, begin + depth) of a panel, begin even, from matrices of f32 | bf16 | f16 and
// any strides: rows [0, gate.shape[0]) of the layout from `gate`, the rest from `up` (absent unless
// paired).
void write_panel(const PanelLayout& layout, const Tensor& gate, const Tensor& up,
                 std::int64_t panel, std::int64_t begin, std::int64_t depth, void* to);

}  // namespace shunt
