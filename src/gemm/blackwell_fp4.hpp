// Grouped GEMM of NVFP4 weights with rows in NVFP4 on Blackwell (sm_120a), both multiplied as they
// are by `mma kind::mxf4nvf4`: how weights and rows lie, the packing on the host, and the product.
//
// Weights are the MMA's A operand. A group's rows stand in the order of cuda_layout.hpp (gate and
// up in blocks of 8 where they are paired) and are cut into fragments of 16 rows by 64 along k: 512
// bytes in the order in which the 32 lanes of a warp hold them, 16 bytes each; those of the same
// rows one after the other. Behind all fragments of a group lie its scales, 16 words a fragment, a
// word the four e4m3 of a row's 64 k; behind them two f32, the global scales of gate (or of the
// only matrix) and up. What fills up is zero.
//
// Rows are packed each as a matrix [1, k] of its own (format.hpp): e2m1, an e4m3 scale for 16 of k,
// and one f32 scale a row; fp4_rows.cuh does that on the GPU.
//
// Sparse weights (`mma.sp`) are read in another way than Hopper reads sparse_nvfp4: of every eight
// along k two of the four aligned pairs are kept, and one e4m3 is for 32 of k, on both sides. A
// sparse_nvfp4 matrix can be laid out where it happens to be so, exactly (fp4_pairs_support);
// pack_in_pairs() of format/pairs.hpp makes such matrices. A fragment is then 16 rows by 128 along
// k, its 512 bytes the kept codes; between codes and scales lie the positions, a word a lane.
#pragma once

#include <cstdint>

#include "activate/kernels.hpp"
#include "cuda/runtime.hpp"
#include "gemm/cuda_layout.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// m16n8k64 of 4-bit operands: which number a lane holds in nibble `i` of register `r`.
struct Fp4Place {
  int row, k;
};
SHUNT_BOTH inline Fp4Place fp4_weight_place(int lane, int r, int i) {
  return {lane / 4 + r % 2 * 8, lane % 4 * 8 + r / 2 * 32 + i};
}
SHUNT_BOTH inline Fp4Place fp4_row_place(int lane, int r, int i) {
  return {lane / 4, lane % 4 * 8 + r * 32 + i};
}
// m16n8k128 of sparse weights: the eight of k, from `k` on, of whose four kept codes a lane holds
// number i % 4 in nibble `i` of register `r`.
SHUNT_BOTH inline Fp4Place fp4_kept_place(int lane, int r, int i) {
  return {lane / 4 + r % 2 * 8, lane % 4 * 16 + r / 2 * 64 + i / 4 * 8};
}
// The eight of k whose two pairs a lane's word of positions names in bits 4 i .. 4 i + 3, the lower
// pair in the lower two.
SHUNT_BOTH inline Fp4Place fp4_positions_place(int lane, int i) {
  return {lane / 4 + lane % 2 * 8, lane / 2 % 2 * 64 + i * 8};
}
// Sum `i` of a lane: of which row of weights, and of which row.
struct Fp4Sum {
  int weight_row, row;
};
SHUNT_BOTH inline Fp4Sum fp4_sum_place(int lane, int i) {
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}
// Whose scales a lane hands over, with selectors 0: two lanes of four those of weights, one those
// of rows; the others' are not looked at.
SHUNT_BOTH inline int fp4_weight_scale_row(int lane) { return lane / 4 + lane % 2 * 8; }
SHUNT_BOTH inline int fp4_row_scale_row(int lane) { return lane / 4; }

struct Fp4Layout {
  std::int64_t n = 0;  // gate and up together when paired
  std::int64_t k = 0;
  bool paired = false;
  bool sparse = false;
  static constexpr std::int64_t fragment_rows = 16, fragment_bytes = 512;

  SHUNT_BOTH std::int64_t fragment_k() const { return sparse ? 128 : 64; }
  SHUNT_BOTH std::int64_t scaled_k() const { return fragment_k() / 4; }  // a scale is for so many
  SHUNT_BOTH RowLayout order() const { return {DType::bf16, n, k, paired}; }
  SHUNT_BOTH std::int64_t rows() const { return order().rows(); }
  SHUNT_BOTH std::int64_t out_columns() const { return order().out_columns(); }
  SHUNT_BOTH std::int64_t steps() const { return (k + fragment_k() - 1) / fragment_k(); }
  SHUNT_BOTH std::int64_t fragments() const {
    return (rows() + fragment_rows - 1) / fragment_rows * steps();
  }
  SHUNT_BOTH std::int64_t positions_at() const { return fragments() * fragment_bytes; }
  SHUNT_BOTH std::int64_t scales_at() const {
    return positions_at() + (sparse ? fragments() * 128 : 0);
  }
  SHUNT_BOTH std::int64_t globals_at() const { return scales_at() + fragments() * 64; }
  SHUNT_BOTH std::int64_t group_bytes() const { return globals_at() + 128; }
};

// Whether a sparse_nvfp4 matrix can be laid out sparse, exactly; `reason` names the first place
// where it cannot.
Support fp4_pairs_support(const PackedMatrix& matrix);

// One group from its NVFP4 matrix (layout.sparse: sparse_nvfp4 that fp4_pairs_support takes), or
// its two where the layout is paired; group_bytes at `to`.
void lay_out_fp4(const Fp4Layout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                 char* to);

// The exact weights of row `row` (gate's before up's) of a group at `from`: to[k].
void read_fp4_row(const Fp4Layout& layout, const char* from, std::int64_t row, double* to);

// Every pointer is the device's.
template <class Layout>
struct Fp4ProductOf {
  Layout layout;
  int groups = 0;
  const char* prepared = nullptr;
  // [groups + 1]; null: as many rows for each group, one group after the other, of which the first
  // counts[g] are there, or all where that is null too.
  const std::int32_t* offsets = nullptr;
  const std::int32_t* counts = nullptr;

  std::int64_t rows = 0;
  const std::uint8_t* codes = nullptr;  // [rows, code_stride], k / 2 of each used
  std::int64_t code_stride = 0;         // in bytes, a multiple of 16; the codes too
  const std::uint8_t* scales =
      nullptr;                    // [rows, scale_stride], one for each 16 of k (sparse: 32) used
  std::int64_t scale_stride = 0;  // in bytes, a multiple of 4; the scales too
  const float* row_scales = nullptr;  // [rows]

  const void* bias = nullptr;  // [groups, n]; null: none
  DType bias_dtype = DType::f32;
  std::int64_t bias_group_stride = 0, bias_stride = 0;
  cpu_engine::ActivationRule activation{.kind = cpu_engine::ActivationRule::identity,
                                        .gated = false};
  void* out = nullptr;  // [rows, out_stride] f32 | bf16 | f16
  DType out_dtype = DType::f32;
  std::int64_t out_stride = 0;
};
using Fp4Product = Fp4ProductOf<Fp4Layout>;

// Enqueues the product. False, and nothing is enqueued: not a GPU of compute capability 12.0, not
// built for it, k = 0, or sizes past 2^31 tiles.
bool multiply_fp4(const Gpu& gpu, const Fp4Product& product);

}  // namespace shunt::cuda_engine
