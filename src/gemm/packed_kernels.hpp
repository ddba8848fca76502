// The table that each instruction set fills with its kernels of multiplication by packed weights.
// Included by files that are compiled for one set: plain types only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shunt::cpu_engine {

// Rows times one panel (packed_panels.hpp), all of k.
struct PackedProduct {
  const float* const* rows = nullptr;  // `count` rows of k numbers
  std::size_t count = 0;
  const char* panel = nullptr;
  std::size_t k = 0;
  std::size_t group = 0;  // of k that share a scale
  int column = 0;         // the first of `columns`, 16, 32 or 64 of the panel's
  int columns = 64;
  const float* globals = nullptr;  // [4]: the global scale of each 16 columns
  bool halves = false;             // int4: scales are f16, else bf16
  float* sums = nullptr;           // [count][64] from the panel's first column: read, added to
};

// sums[r][c] = fma(sum of one group of k, scale, sums[r][c]), one group after the other from the
// first to the last; the sum of a group starts at 0 and takes one k after the other, fused (where
// the set has FMA) and rounded to f32: the same bits whatever `count` and `columns`. Codes are
// decoded exactly; a scale with a global one is their product, rounded once.
inline constexpr int packed_tile_rows = 4;
using PackedKernel = void (*)(const PackedProduct&);
struct PackedKernels {
  PackedKernel fp8_column;  // fp8_tensor, fp8_channel
  PackedKernel fp8_block;
  PackedKernel mxfp8;
  PackedKernel nvfp4;
  PackedKernel mxfp4;
  PackedKernel int8;
  PackedKernel int4;
  PackedKernel dense3;
  PackedKernel sparse_nvfp4;
};

namespace scalar {
extern const PackedKernels packed_kernels;
}
namespace avx2 {
extern const PackedKernels packed_kernels;
}
namespace avx512 {
extern const PackedKernels packed_kernels;
}

}  // namespace shunt::cpu_engine
