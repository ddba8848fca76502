// The table that each instruction set fills with its kernels of multiplication by packed weights.
// Included by files that are compiled for one set: plain types only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/fetch_distances.hpp"
#include "gemm/row_tiles.hpp"

namespace shunt::cpu_engine {

// What stands before a group's codes in a panel (packed_panels.hpp).
enum class PackedScale : std::uint8_t { column, block, e8m0, e4m3, f16, bf16 };

// Rows times one panel (packed_panels.hpp), all of k.
struct PackedProduct {
  const void* const* rows = nullptr;  // `count` rows of k numbers: f32, or bf16 for packed_dots
  std::size_t count = 0;
  const char* panel = nullptr;
  std::size_t k = 0;
  std::size_t group = 0;        // of k that share a scale
  std::size_t fetch_ahead = 0;  // bytes from what is read of the panel to what is fetched meanwhile
  // Unless 0, of one row: that goes to the L2 alone, and what is so far from it to the L1.
  std::size_t fetch_near = 0;
  int column = 0;  // the first of `columns`, 16, 32 or 64 of the panel's
  int columns = 64;
  const float* globals = nullptr;  // [4]: the global scale of each 16 columns
  PackedScale scale = PackedScale::column;
  bool zeros = false;           // int4: zero points stand behind the scales; else all are 8
  float* sums = nullptr;        // [count][64] from the panel's first column: read, added to
  const void* tiles = nullptr;  // the rows beside each other (row_tiles.hpp), where they are many
};

using PackedKernel = void (*)(const PackedProduct&);
// A kernel for each way of writing codes, for every scale that a format has with them.
struct PackedKernels {
  PackedKernel e4m3;  // fp8_tensor, fp8_channel, fp8_block, mxfp8
  PackedKernel e2m1;  // nvfp4, mxfp4
  PackedKernel int8;
  PackedKernel int4;
  PackedKernel dense3;
  PackedKernel sparse;  // sparse_nvfp4
  int tile_rows;        // rows of the largest register tile
};

// `packed_kernels`, of rows in f32: sums[r][c] = fma(sum of one group of k, scale, sums[r][c]), one
// group after the other from the first to the last; the sum of a group starts at 0 and takes one k
// after the other, fused (where the set has FMA) and rounded to f32: the same bits whatever `count`
// and `columns`. Codes are decoded exactly; a scale with a global one is their product, rounded
// once.
namespace scalar {
extern const PackedKernels packed_kernels;
}
namespace avx2 {
extern const PackedKernels packed_kernels;
}
namespace avx512 {
extern const PackedKernels packed_kernels;
}
// Rows in bf16, summed by vdpbf16ps: packed_kernels_avx512_bf16.cpp says how they are rounded.
// Both have the same bits; Features::shifts_beside_dots says which is faster.
namespace avx512_bf16 {
extern const PackedKernels packed_kernels, packed_kernels_by_shifts;
}
// By tdpbf16ps: packed_kernels_amx_bf16.cpp.
namespace amx_bf16 {
extern const PackedKernel e4m3_kernel;
extern const RowTiles e4m3_tiles;
}  // namespace amx_bf16

}  // namespace shunt::cpu_engine
