// Grouped GEMM over groups of rows, and the prepared form of weights that it is fastest on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Groups of weight matrices [n, k] laid out as the engine of one device reads them. The bytes are
// the caller's, 64-byte aligned (CPU) or 256-byte (CUDA); this is a view of them.
struct PreparedWeights {
  // f32 | bf16 | f16: of weights; of packed ones what rows are rounded to and weights decoded to
  DType dtype = DType::f32;
  int groups = 0;
  std::int64_t n = 0;   // columns of the output; gate and up together when paired
  std::int64_t k = 0;   // columns of the input
  bool paired = false;  // gate and up columns stand beside each other: for the fused layer only
  Device device{};
  void* data = nullptr;
  std::size_t bytes = 0;
  FormatSpec format{};                   // not plain: packed, scales in the same bytes
  RowFormat rows = RowFormat::as_dtype;  // of packed ones on a GPU: what they are laid out for
  explicit operator bool() const { return data != nullptr; }
};

// Bytes of `groups` prepared matrices [n, k] (n counts gate and up when paired). Throws Error for
// sizes that are negative or overflow.
std::size_t prepared_bytes(const Context& context, DType dtype, int groups, std::int64_t n,
                           std::int64_t k, bool paired = false);
// Lays out matrices: one view [n, k] a group, of one dtype, f32 | bf16 | f16, any strides (a
// transposed checkpoint is a view with exchanged strides); rounded to `dtype` to nearest even, f16
// saturating. `memory` must hold prepared_bytes. Uses all threads; allocates no weights. On CUDA
// they may lie on the host (each is copied first: memory for the largest) or on the device, read in
// the stream's order. It waits: the matrices are not needed afterwards.
PreparedWeights prepare(const Context& context, DType dtype, const std::vector<Tensor>& matrices,
                        Workspace memory);
// The paired form: gate[g] and up[g], each [n / 2, k]. An interleaved checkpoint is two views with
// doubled row strides.
PreparedWeights prepare_paired(const Context& context, DType dtype, const std::vector<Tensor>& gate,
                               const std::vector<Tensor>& up, Workspace memory);

// The same for packed weights: matrices of one format and size, on the host. They stay packed; what
// changes is the order of bytes. `dtype` is what a kernel decodes them to where it multiplies in
// 16 bits or f32. prepared_bytes wants the prepared format, prepared_format() of the matrices.
// Where it is `ordered` k are sorted by their groups, of which each must be full
// (Error{unsupported}), and every product puts its rows into that order first; gate and up of a
// matrix must have one order on a GPU. `rows`: with which rows a GPU is to multiply them, as
// GroupedGemmSpec says; the CPU takes no notice. Scales of int4 that are f32 must be exact in bf16,
// and on the CPU, where either of gate and up has f16 ones, the other's must be exact in f16
// (Error{unsupported}). For nvfp4 the layout is the GPU's own, and is not saved to disk. On a GPU,
// f16 keeps a block of mxfp4 or mxfp8 exact that is 2^22 smaller than its row's largest, bf16
// 2^120, and what lies below counts as zero in the end.
std::size_t prepared_bytes(const Context& context, DType dtype, const FormatSpec& format,
                           int groups, std::int64_t n, std::int64_t k, bool paired = false,
                           RowFormat rows = RowFormat::as_dtype);
PreparedWeights prepare_packed(const Context& context, DType dtype,
                               const std::vector<PackedMatrix>& matrices, Workspace memory,
                               RowFormat rows = RowFormat::as_dtype);
// The matrices' own format, `ordered` where one has group_of, with `zeros` where one has zero
// points other than 8. `up`: those that the others are paired with. Throws Error{invalid_argument}
// for no matrices, and for zero points that do not fit theirs.
FormatSpec prepared_format(const std::vector<PackedMatrix>& matrices,
                           const std::vector<PackedMatrix>& up = {});
// Gate and up keep a global scale each.
PreparedWeights prepare_packed_paired(const Context& context, DType dtype,
                                      const std::vector<PackedMatrix>& gate,
                                      const std::vector<PackedMatrix>& up, Workspace memory,
                                      RowFormat rows = RowFormat::as_dtype);

// The inverse of all of them: writes matrix `group` into out [n, k] (gate rows first when paired),
// of any float dtype and any strides that keep its elements apart, on the context's device.
void unprepare(const Context& context, const PreparedWeights& weights, int group, Tensor out);

// In place: `matrices` [groups, n, k], dense, on the context's device, 64-byte aligned, become
// their own prepared form; no second copy stays. Paired: each has gate's n / 2 rows before up's.
// `scratch` has room for one matrix. Throws Error{unsupported} where the layout fills up, so that
// prepared_bytes of a matrix are more: on a CPU unless n is a multiple of 64 and, in bf16, k of 2;
// on a GPU in 16 bits unless n is one of 128 and k of 64. Waits.
PreparedWeights prepare_in_place(const Context& context, Tensor matrices, bool paired,
                                 Workspace scratch);
// The inverse: the bytes become the matrices [groups, n, k] again.
void unprepare_in_place(const Context& context, const PreparedWeights& weights, Workspace scratch);

// On disk: a safetensors file of one tensor, whose metadata says layout, dtype and sizes; written
// whole or not at all.
void save_prepared(const Context& context, const PreparedWeights& weights, const std::string& path);
// The file's weights in new memory of the context's device, which `memory` then owns. Throws
// Error{bad_file} for another or a truncated file, Error{unsupported} naming the layout where it is
// not the one that this context's engine reads, Error{io}.
PreparedWeights load_prepared(const Context& context, const std::string& path, Buffer& memory);

struct GroupedGemmSpec {
  int groups = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType dtype = DType::f32;  // of the weights; rows are rounded to it, sums are f32
  bool bias = false;
  bool prepared = true;  // false: plain weights [groups, n, k], laid out panel by panel on the way
  FormatSpec format{};   // of prepared weights that are packed
  RowFormat rows = RowFormat::as_dtype;
  // On a GPU a row's bits do not depend on the number of others: k is never shared out.
  bool batch_invariant = false;
  // Of rows fp8_token: sums over k may stay in Hopper's tensor cores, as use_fast_accum of
  // torch._scaled_grouped_mm has them: each of k / 32 instructions keeps 13 bits behind the first
  // of the largest of what it adds. Else sums leave them every 128 products. Kernels for few rows,
  // and products with a bias or to f32, have the latter whatever this says, so not with
  // batch_invariant.
  bool fast_accumulation = false;
  bool operator==(const GroupedGemmSpec&) const = default;
};
// Which rows a group has, one of:
//   ragged   rows [R, k] with offsets: groups one after the other, of any size
//   masked   rows [groups, capacity, k] with counts: each group has room for as many, and of these
//            the first counts[g] are there; what the others hold is not looked at
//   dense    without either: rows [groups, capacity, k], all there; or [R, k] of one group
// Offsets and counts lie on the context's device, and a GPU reads them there when it runs.
struct GroupedGemmInputs {
  // f32 | bf16 | f16, rows may be strided; f8_e4m3 iff row_scales are given. In three dimensions
  // groups follow one another without a gap: stride 0 is capacity times stride 1.
  Tensor rows{};
  Tensor offsets{};  // [groups + 1] i32, ascending from 0: rows of group g are [o[g], o[g+1])
  Tensor counts{};   // [groups] i32, 0 to capacity
  // How many rows a group is likely to have, for the choice of a kernel on a GPU; every number of
  // rows is right whatever it says. 0: as many as there is room for.
  std::int64_t expected_rows = 0;
  Tensor weights{};  // [groups, n, k] f32 | bf16 | f16, any strides; iff not spec.prepared
  PreparedWeights prepared{};  // iff spec.prepared
  Tensor bias{};               // [groups, n] f32 | bf16 | f16; iff spec.bias
  // Rows that are rounded already, as gather() rounds them: f32 [R, ceil(k / 128)] for
  // RowFormat::fp8_block, any strides, [R] for fp8_token; of rows in three dimensions [groups,
  // capacity, ..], groups without a gap between them. Rows for nvfp4 are rounded here, in the
  // workspace
  Tensor row_scales{};
};

// Of a GPU that is there: what that one computes; else what the engine may.
Support supports(const GroupedGemmSpec& spec, Device device);
// `rows`: R, or groups * capacity.
std::size_t grouped_gemm_workspace_bytes(const Context& context, const GroupedGemmSpec& spec,
                                         std::int64_t rows);
// out [R, n] f32 | bf16 | f16: out[r] = W[g] rows[r] + bias[g]; [groups, capacity, n] where rows
// have three dimensions. Every element's sum runs over k in one fixed order, so its bits depend on
// neither the number of threads nor which rows there are; on a GPU the order may follow from how
// many there are room for or expected, unless spec.batch_invariant. Rows at or past
// offsets[groups], or in a group at or past its count, are left alone. out and rows do not overlap.
// Throws Error for bad shapes and (CPU) offsets and counts; a GPU takes a count below 0 for 0 and
// one above capacity for capacity.
void grouped_gemm(const Context& context, const GroupedGemmSpec& spec, const GroupedGemmInputs& in,
                  Tensor out, Workspace workspace);

}  // namespace shunt
