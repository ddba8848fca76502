// Grouped GEMM of NVFP4 weights with rows in NVFP4: which of Blackwell's kernels a GPU has, weights
// in its layout, rows that are rounded, and the product. Compiled, not run.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/blackwell_fp4.hpp"
#include "gemm/blackwell_fp4_tiles.hpp"
#include "shunt/gemm.hpp"

namespace shunt::cuda_engine {

enum class Fp4Kernel : std::int32_t {
  none = 0,
  fragments = 1,  // mma.sync, compute capability 12.0
  tiles = 2,      // tcgen05, 10.0
};
// By a GPU's compute capability, 90 for 9.0.
constexpr Fp4Kernel fp4_kernel(int compute) {
  return compute == 120   ? Fp4Kernel::fragments
         : compute == 100 ? Fp4Kernel::tiles
                          : Fp4Kernel::none;
}
// Whether a GPU multiplies weights of this format with rows in NVFP4.
Support fp4_support(int compute, Format format);
// Whether the library has it: kernels for one architecture alone do not come from another's code.
bool fp4_built(int compute);

// Prepared weights of either kernel: one of the two layouts.
struct Fp4Weights {
  Fp4Kernel kernel = Fp4Kernel::none;
  Format format = Format::nvfp4;  // or sparse_nvfp4
  std::int64_t n = 0, k = 0;      // n: gate and up together when paired
  bool paired = false;

  bool sparse() const { return format == Format::sparse_nvfp4; }
  Fp4Layout fragments() const { return {n, k, paired, sparse()}; }
  Fp4Tiles tiles() const { return {n, k, paired, sparse()}; }
  std::int64_t group_bytes() const {
    return kernel == Fp4Kernel::fragments ? fragments().group_bytes() : tiles().group_bytes();
  }
};
Fp4Weights fp4_weights(int compute, const PreparedWeights& weights);

// One group from its matrix, or its two where they are paired; group_bytes at `to`.
void lay_out(const Fp4Weights& layout, const PackedMatrix& gate, const PackedMatrix* up, char* to);
// The exact weights of row `row` (gate's before up's) of a group at `from`: to[k].
void read_row(const Fp4Weights& layout, const char* from, std::int64_t row, double* to);

// All groups onto the device, and one back, rounded once, into out [n, k]; both wait, and take
// memory of the host for one. write_fp4 throws Error{unsupported} for sparse weights that are not
// in pairs, by `what` and their place.
void write_fp4(const char* what, const Context& context, const Fp4Weights& layout,
               const std::vector<PackedMatrix>& gate, const std::vector<PackedMatrix>* up,
               void* to);
void read_fp4(const Context& context, const Fp4Weights& layout, const void* from,
              const Tensor& out);

// Rows in NVFP4 as the kernels read them, in memory of `bytes`.
struct Fp4Rows {
  std::uint8_t* codes = nullptr;
  std::uint8_t* scales = nullptr;
  float* row_scales = nullptr;
  std::int64_t code_stride = 0, scale_stride = 0;  // in bytes
  std::size_t bytes = 0;
  // Of `rows` rows [rows, k] at `memory`; null: for the bytes alone.
  static Fp4Rows at(void* memory, std::int64_t rows, std::int64_t k, bool sparse);
};

// Every pointer is the device's.
struct Fp4RowProduct {
  Fp4Weights layout;
  int groups = 0;
  const void* prepared = nullptr;
  const std::int32_t* offsets = nullptr;  // as Fp4ProductOf
  const std::int32_t* counts = nullptr;
  Tensor rows{};                              // [T, k] f32 | bf16 | f16, rows may be strided
  const std::int32_t* permutation = nullptr;  // row r reads rows[permutation[r] / slots]
  int slots = 1;
  const float* row_scale = nullptr;  // row r times row_scale[r] before it is rounded
  Tensor bias{};                     // [groups, n], any strides; may be absent
  cpu_engine::ActivationRule activation{.kind = cpu_engine::ActivationRule::identity,
                                        .gated = false};
  Tensor out{};  // [R, out columns] f32 | bf16 | f16, rows may be strided
};
// Enqueues the rounding alone, of R rows: a permutation that is out of range gives zeros.
void round_rows_to_fp4(const Gpu& gpu, const Fp4RowProduct& product, const Fp4Rows& to);
// Enqueues the rounding of rows into `memory` and the product. Throws Error{unsupported} where the
// GPU has no kernel.
void multiply_fp4_rows(const Gpu& gpu, const Fp4RowProduct& product, void* memory);

}  // namespace shunt::cuda_engine
