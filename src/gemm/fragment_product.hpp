// Grouped GEMM of 16-bit rows with packed weights: what is multiplied, and the kernels that do,
// Hopper's and those of any GPU since compute capability 8.0. Codes become numbers of the rows'
// type in registers, on their way to the tensor cores.
//
// What is computed: sums in f32 of weights exact in the rows' type (nvfp4, sparse_nvfp4, mxfp4 as
// far as the type reaches, integers, e4m3), times scales in f32 where these are not in the weights.
// Few rows: int4's and dense3's scales multiply the sums of their groups. Many rows: each weight is
// rounded once to the type, or twice where a scale of int4 has more than bf16's eight bits.
#pragma once

#include <cstdint>
#include <string>

#include "activate/kernels.hpp"
#include "cuda/runtime.hpp"
#include "gemm/fragment_codes.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/packed_plan.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Every pointer is the device's.
struct FragmentProduct {
  FragmentLayout layout;
  int groups = 0;
  const void* prepared = nullptr;

  // [groups + 1]; null: as many rows for each group, one group after the other, of which the first
  // counts[g] are there, or all where that is null too.
  const std::int32_t* offsets = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t group_rows = 0;  // that a group is expected to have; 0: what it has room for
  bool whole_k = false;         // a row's bits do not depend on how many there are
  bool early = false;           // as GroupedProduct
  int tile_before = 0;          // PackedSizes::tile_before

  Tensor rows{};  // [T, k] f32 | bf16 | f16, rows may be strided; rounded to the layout's dtype
  const std::int32_t* permutation = nullptr;  // row r reads rows[permutation[r] / slots]
  int slots = 1;
  // Row r times row_scale[r] before it is rounded; few rows without whole_k: its sums instead.
  const float* row_scale = nullptr;

  Tensor bias{};  // [groups, n], any strides; may be absent
  cpu_engine::ActivationRule activation{.kind = cpu_engine::ActivationRule::identity,
                                        .gated = false};
  Tensor out{};  // [R, out columns] f32 | bf16 | f16, rows may be strided
};

// What the kernels know, by value.
struct FragmentArgs {
  int groups = 0;
  GroupWalk walk;
  int steps = 0;    // of 128 along k
  int columns = 0;  // tiles of 128 rows of weights a group
  const char* tiles = nullptr;
  std::int64_t group_bytes = 0, factors_at = 0;
  float unscale = 1;
  bool early = false;
  std::uint32_t* counter = nullptr;  // of claimed tiles: tile_claims.cuh

  const char* source = nullptr;
  DType source_dtype = DType::bf16;
  std::int64_t source_rows = 0, source_row_bytes = 0, k = 0;
  bool direct = false;  // rows are copied as they are, in aligned pieces of 16 bytes
  const std::int32_t* permutation = nullptr;
  int slots = 1;
  const float* row_scale = nullptr;
  const float* sum_scale = nullptr;  // few rows': sums of row r of the order times sum_scale[r]

  Finish finish;
};

PackedSizes sizes_of(const FragmentProduct& product);
// Of a product of `rows` rows that are copied as they are.
PackedSizes sizes_of(const FragmentLayout& layout, int groups, std::int64_t rows);
FragmentArgs args_of(const FragmentProduct& product);
// Whether rows that a permutation picks are better gathered, converted and weighed beforehand.
bool gathering_pays(const Gpu& gpu, const FragmentLayout& layout, int groups, std::int64_t rows,
                    const PickedRows& picked);
// Every plan for the product: Hopper's for few and for many rows, elsewhere those of
// portable_fragment_candidates(); none: it has no rows or no weights.
PackedPlans fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu);
// Of what any GPU since compute capability 8.0 runs.
PackedPlans portable_fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu);
PackedPlan plan_fragments(const PackedSizes& sizes, const GpuFigures& gpu);
std::string fragment_words(const PackedPlan& plan);

// Rows of an ordered layout's product stand in the order of their group's k before they are
// multiplied: a pass for it (ordered_rows.cu).
std::size_t ordered_rows_bytes(std::int64_t rows, std::int64_t k);
// Enqueues the pass into `memory`. Returns the product of what it writes: rows of the layout's
// dtype, gathered and times their row_scale.
FragmentProduct order_rows(const Gpu& gpu, const FragmentProduct& product, void* memory);

// Enqueues the product. False: the plan cannot; nothing was enqueued. Rows are in order.
bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const FragmentProduct& product);
// `memory`: ordered_rows_bytes() where the layout is ordered, else unused. The chain as
// multiply_groups() has it.
void multiply_fragments(const Gpu& gpu, const FragmentProduct& product, void* memory,
                        const FewChain& chain = {});
bool takes_pairs(const Gpu& gpu, const FragmentProduct& product);
std::string product_words(const Gpu& gpu, const PackedSizes& sizes);

// Plans for many rows in tiles of so many rows at most take fragment_middle_rows.cuh.
inline constexpr int most_middle_tokens = 160;
// Whether two of its blocks share rows that lie in order: not where k is so short that what a
// cluster's start takes counts, nor where a block would have no weights.
constexpr bool blocks_share(std::int64_t columns, std::int64_t steps) {
  return steps >= 16 && (columns + 1) / 2 % 2 == 0;
}
// By families of formats, so that none compiles for long.
using FewFragmentLaunch = void(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                               const FragmentArgs& args, const FewChain& chain);
using FragmentLaunch = void(const Gpu& gpu, const PackedPlan& plan, const FragmentLayout& layout,
                            const FragmentArgs& args);
FewFragmentLaunch fragment_few_dense3, fragment_few_fp4_bf16, fragment_few_fp4_f16,
    fragment_few_sparse, fragment_few_int4_bf16, fragment_few_int4_f16, fragment_few_wide;
FragmentLaunch fragment_middle_dense3, fragment_middle_fp4_bf16, fragment_middle_fp4_f16,
    fragment_middle_sparse, fragment_middle_int4_bf16, fragment_middle_int4_f16,
    fragment_middle_wide;
FragmentLaunch fragment_many_dense3, fragment_many_fp4_bf16, fragment_many_fp4_f16,
    fragment_many_sparse, fragment_many_int4_bf16, fragment_many_int4_f16, fragment_many_wide;
FragmentLaunch mma_fragments_dense3, mma_fragments_fp4, mma_fragments_int4, mma_fragments_wide;

}  // namespace shunt::cuda_engine
