// The prepared layout of packed weights on the CPU, one source of truth: who writes it, who reads
// it, how many bytes.
//
// Panels of 64 columns as in layout.hpp, gate and up in blocks of 16 that take turns when paired. A
// group begins with a header of 64 bytes; its panels follow. An ordered format has between them
// which k stands at each place, i32 [k], gate's and then up's when paired, 64-byte aligned: k in
// order of their groups. A panel is one stream of groups of k, each its scales and then its codes,
// all multiples of 64 bytes:
//   fp8_tensor, fp8_channel  [64] f32 for all of k;     codes [k / 2][64][2] e4m3
//   fp8_block                [4] f32, of 16 columns each, and padding, for 128 of k; codes the same
//   mxfp8                    [64] e8m0 for 32;          codes the same
//   int8                     [64] f32 for all of k;     codes [k / 4][64][4]
//   nvfp4                    [64] e4m3 for 16;          codes [k / 8][64] words of eight nibbles,
//                                                       from the low end up k 0, 2, 4, 6, then 1,
//                                                       3, 5, 7
//   mxfp4                    [64] e8m0 for 32;          codes the same
//   int4                     [64] f16 or bf16 for a group and, with zeros, [64] u8; codes the same
//   dense3                   [64] e4m3 for 32;          codes [3][64] words of the group's 96 bits
//   sparse_nvfp4             [64] e4m3 for 16;          [64] half-words of eight positions, [64]
//                                                       words of eight nibbles in that order
// so that a kernel finds a column's next codes in one word of a vector's lane, and memory is read
// from front to back. What k or the columns do not fill is zero, and means nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/features.hpp"
#include "gemm/fixed_rows.hpp"
#include "gemm/fixed_tiles.hpp"
#include "gemm/layout.hpp"
#include "gemm/packed_kernels.hpp"
#include "shunt/format.hpp"

namespace shunt::cpu_engine {

// Where in its word the nibble of the i-th k (or kept code) lies: a pair stands 16 bits apart, so
// that a look-up of half-words finds both.
constexpr int packed_nibble_bit(std::int64_t i) {
  return static_cast<int>(16 * (i % 2) + 4 * (i / 2));
}

struct PackedHeader {
  float global[2] = {1, 1};  // gate's (or the only one) and up's
  std::uint32_t halves = 0;  // int4: scales are f16 (one of the pair's were), else bf16
  std::uint32_t apart = 0;   // ordered and paired: up's order is not gate's
};

struct PackedPanels {
  FormatSpec format{};
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;

  static constexpr std::int64_t header_bytes = 64;
  PanelLayout order() const { return {DType::f32, n, k, paired}; }
  // Of k that share a scale; at least 1.
  std::int64_t group() const;
  std::int64_t scale_bytes() const;
  // Codes of `count` k: a group, or its last part.
  std::int64_t code_bytes(std::int64_t count) const;
  std::int64_t panel_bytes() const;
  // Orders of k that a group keeps, and how far apart they are.
  std::int64_t orders() const { return !format.ordered ? 0 : paired ? 2 : 1; }
  std::int64_t order_bytes() const { return (4 * k + 63) / 64 * 64; }
  std::int64_t panels_at() const { return header_bytes + orders() * order_bytes(); }
  std::int64_t group_bytes() const { return panels_at() + order().panels() * panel_bytes(); }
  // The k at each place of an ordered group: which 0 or 1.
  const std::int32_t* order_of(const char* group_data, std::int64_t which) const {
    return reinterpret_cast<const std::int32_t*>(group_data + header_bytes + which * order_bytes());
  }
};

// Of the engine's layout: whether it is of packed weights, and as which panels.
// Weights of no k have no panels, whatever their format.
inline bool packed(const PanelLayout& layout) {
  return layout.format != FormatSpec{} && layout.k > 0;
}
inline PackedPanels packed_panels(const PanelLayout& layout) {
  return {layout.format, layout.n, layout.k, layout.paired};
}

// Whether the header and the orders of a group, which a file may have damaged, can be followed.
bool can_be_followed(const PackedPanels& layout, const char* group_data);
// The header of a group and its orders: before its panels.
void write_packed_header(const PackedPanels& layout, const PackedMatrix& gate,
                         const PackedMatrix* up, char* group_data);
// One panel from its matrices. False when a scale or an e4m3 is NaN.
bool write_packed_panel(const PackedPanels& layout, const PackedMatrix& gate,
                        const PackedMatrix* up, std::int64_t panel, char* group_data);
// The exact weights of a column of a panel: to[k], in the matrix's own order.
void read_packed_column(const PackedPanels& layout, const char* group, std::int64_t panel,
                        std::int64_t column, double* to);

// `halves` as in PackedHeader.
PackedScale packed_scale(Format format, bool halves);
// `dot`: of rows in bf16.
const PackedKernels& packed_kernels(Isa isa, bool dot);
// Whether a set multiplies rows in bf16 as they are: avx512_bf16 by vdpbf16ps, but for dense3 and,
// on some CPUs, int8; amx_bf16 e4m3 by tiles.
bool packed_dots(Isa isa, Format format);
// Those of rows in bf16 that are multiplied as they are.
RowTiles packed_tiles(Isa isa);
PackedKernel packed_kernel(const PackedKernels& kernels, Format format);
// What multiplies rows of `dtype` as fixed_rows.hpp lays them out; null: they stay floats.
struct FixedProduct : FixedFormat {
  std::size_t group = 0;  // a block of the rows
  FixedTiles tiles;
};
FixedProduct fixed_product(Isa isa, const PackedPanels& panels, DType dtype);

}  // namespace shunt::cpu_engine
