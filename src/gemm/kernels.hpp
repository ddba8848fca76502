// The table that each instruction set fills with its kernels of multiplication. Included by files
// that are compiled for one set: plain types only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/row_tiles.hpp"

namespace shunt::cpu_engine {

// Rows times a stretch of k of one panel (layout.hpp).
struct Product {
  const void* const* rows = nullptr;  // `count` pointers to rows, and how many bytes further the
  std::size_t row_offset = 0;         // stretch begins
  std::size_t count = 0;
  const void* weights = nullptr;  // the stretch, at its first column
  std::size_t k = 0;              // its length
  int columns = 64;               // 16, 32 or 64 of the panel's
  float* sums = nullptr;          // [count][64], read, added to and written
  // The rows beside each other (row_tiles.hpp) from the stretch on, and how far 16 rows are from
  // the next; where they are many.
  const char* tiles = nullptr;
  std::size_t tile_bytes = 0;
  // What will be read next, to be fetched into the L2 meanwhile. Null: nothing.
  const char* ahead = nullptr;
  std::size_t ahead_bytes = 0;
};

struct GemmKernels {
  // sums[r][c] += rows[r][i] * weights[i][c], one i after the other from the first to the last,
  // each one fused (where the set has FMA) and rounded to f32: the same bits whatever `count`,
  // `columns` and the cut of k into stretches of even length.
  void (*f32)(const Product&);   // rows f32, weights f32
  void (*f16)(const Product&);   // rows f32, weights f16
  void (*bf16)(const Product&);  // rows f32, weights bf16
  // Rows and weights bf16, rows of even length: pairs of i at once, as vdpbf16ps or tdpbf16ps
  // rounds them. Null where the set has no such instruction.
  void (*bf16_dot)(const Product&);
  // Rows that bf16_dot wants beside each other: stretches begin at multiples of 32 then.
  RowTiles tiles;
  // A stretch of f16 or bf16 weights as the kernel f32 takes them.
  void (*widen_f16)(const void* weights, std::size_t k, float* to);
  void (*widen_bf16)(const void* weights, std::size_t k, float* to);
  // Rows that one register tile takes; a count is cut into tiles as even as can be.
  int tile_rows;
};

namespace scalar {
extern const GemmKernels gemm_kernels;
}
namespace avx2 {
extern const GemmKernels gemm_kernels;
}
namespace avx512 {
extern const GemmKernels gemm_kernels;
}
namespace avx512_bf16 {
extern const GemmKernels gemm_kernels;
}
namespace amx_bf16 {
extern const GemmKernels gemm_kernels;
}

}  // namespace shunt::cpu_engine
