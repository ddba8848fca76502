// Many rows in blocks of integers (fixed_rows.hpp) by tiles of bytes (AMX): the same integers, and so
// the same bits, as by FixedFormat's multiply.
#pragma once

#include <cstddef>

#include "gemm/packed_kernels.hpp"

namespace shunt::cpu_engine {

struct FixedTiles {
  int from = 0;  // rows that it takes to be faster
  // What up to 16 rows take beside each other, of blocks of `group`.
  std::size_t (*bytes)(std::size_t k, std::size_t group) = nullptr;
  // `count` rows, so many times that; `to` at a multiple of 64.
  void (*pack)(const void* const* rows, std::size_t count, std::size_t k, std::size_t group,
               void* to) = nullptr;
  // PackedProduct::rows: `to`.
  void (*multiply)(const PackedProduct& p, const void* packed) = nullptr;
};

constexpr std::size_t most_tiled_group = 256;

// Of blocks of 16 or 32.
namespace amx_bf16 {
extern const FixedTiles nvfp4_pairs, mxfp4_pairs, int4_pairs, sparse_pairs;
}
// Of blocks of 64, and of their multiples up to 256.
namespace amx_int8 {
extern const FixedTiles int4_tiles, int8_tiles;
}

}  // namespace shunt::cpu_engine
