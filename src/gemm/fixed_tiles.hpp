// Many rows in blocks of integers (fixed_rows.hpp) by tiles (AMX): the same integers, and so the
// same bits, as by FixedFormat's multiply.
#pragma once

#include "gemm/packed_kernels.hpp"
#include "gemm/row_tiles.hpp"

namespace shunt::cpu_engine {

struct FixedTiles {
  RowTiles rows;
  PackedKernel multiply = nullptr;  // of `rows.from` and more; PackedProduct::tiles is read
};

// Fewer are multiplied faster one by one (two cores of a Xeon, layers of 64 and 128 tokens: from 6
// as from 8, from 12 up to a tenth slower).
constexpr std::size_t least_tiled_rows = 8;
constexpr std::size_t most_tiled_group = 256;

// Of blocks of 16 or 32.
namespace amx_bf16 {
extern const FixedTiles nvfp4_pairs, mxfp4_pairs, int4_pairs, sparse_pairs;
}
// Of blocks of 64, and of their multiples up to 256; dense3 of its 32.
namespace amx_int8 {
extern const FixedTiles int4_tiles, int8_tiles, dense3_tiles;
}

}  // namespace shunt::cpu_engine
