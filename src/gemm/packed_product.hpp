// Grouped GEMM of packed weights on the GPU: what is multiplied, and the kernels that do.
//
// fp8: both sides are e4m3. Every 128 products are summed by the tensor cores, and these sums, each
// times its scales, in f32 from first to last. Rows that come in 16 or 32 bits are rounded as
// gather() rounds them (order.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "activate/kernels.hpp"
#include "cuda/runtime.hpp"
#include "gemm/fused.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/packed_layout.hpp"
#include "gemm/packed_plan.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Whether a GPU multiplies packed weights with such rows. Yes where it is not there to be asked.
Support packed_support(Device device, const FormatSpec& format, RowFormat rows);

// Every pointer is the device's.
struct PackedProduct {
  PackedLayout layout;
  int groups = 0;
  const void* prepared = nullptr;

  // [groups + 1]; null: as many rows for each group, one group after the other, of which the first
  // counts[g] are there, or all where that is null too.
  const std::int32_t* offsets = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t group_rows = 0;     // that a group is expected to have; 0: what it has room for
  bool whole_k = false;            // as PackedSizes
  bool fast_accumulation = false;  // as GroupedGemmSpec
  bool early = false;              // as GroupedProduct

  Tensor rows{};        // [T, k] f32 | bf16 | f16 | f8_e4m3, rows may be strided
  Tensor row_scales{};  // of f8_e4m3: f32 [T, ceil(k / 128)] or [T], any strides
  const std::int32_t* permutation = nullptr;  // row r reads rows[permutation[r] / slots]
  int slots = 1;
  // Row r times row_scale[r] before it is rounded; few rows without whole_k: its sums instead.
  const float* row_scale = nullptr;

  Tensor bias{};  // [groups, n], any strides; may be absent
  cpu_engine::ActivationRule activation{.kind = cpu_engine::ActivationRule::identity,
                                        .gated = false};
  Tensor out{};  // [R, out columns] f32 | bf16 | f16 | f8_e4m3, rows may be strided
  RowPlaces places{};
  // Of an out of f8_e4m3: f32 [R, ceil(out columns / 128)], any strides. Results are rounded to
  // `between` first, then as gather() rounds rows.
  Tensor out_scales{};
  DType between = DType::bf16;
};

// What both kernels know, by value.
struct PackedArgs {
  int groups = 0;
  GroupWalk walk;
  int steps = 0;    // of 128 along k
  int columns = 0;  // tiles of weights a group, for a whole cluster
  int row_tiles = 0;
  const char* tiles = nullptr;
  std::int64_t group_bytes = 0, scales_at = 0;
  bool block_scales = false;

  const char* source = nullptr;
  DType source_dtype = DType::bf16;
  std::int64_t source_rows = 0, source_row_bytes = 0, k = 0;
  bool aligned = false;  // eight numbers of a row at once
  bool pieces = false;   // rows are fp8 and unweighted, at multiples of 16 bytes
  const float* row_scales = nullptr;
  std::int64_t row_scale_stride = 0, row_scale_step = 0;
  const std::int32_t* permutation = nullptr;
  int slots = 1;
  const float* row_weight = nullptr;
  const float* sum_weight = nullptr;  // few rows': sums of row r of the order times sum_weight[r]
  bool early = false;
  std::uint32_t* counter = nullptr;  // of claimed tiles: tile_claims.cuh

  Finish finish;
  float* out_scales = nullptr;
  std::int64_t out_scale_stride = 0, out_scale_step = 0;
  DType between = DType::bf16;
};

PackedSizes sizes_of(const PackedProduct& product);
// Enqueues the product. False: the plan, or the driver, cannot; nothing was enqueued.
bool multiply_as_planned(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& product);
void multiply_packed(const Gpu& gpu, const PackedProduct& product);
// As multiply_groups() with a chain.
void multiply_packed(const Gpu& gpu, const PackedProduct& product, const FewChain& chain);
bool takes_pairs(const Gpu& gpu, const PackedProduct& product);
bool takes_places(const Gpu& gpu, const PackedProduct& product);
Rounding plan_rounding(const Gpu& gpu, const PackedLayout& gate_up, const PackedLayout& down,
                       int groups, std::int64_t rows);
// How rows become fp8, and product_words() of the rest.
std::string fp8_words(const Gpu& gpu, const PackedSizes& sizes);

bool fp8_many_rows(const Gpu& gpu, const PackedPlan& plan, const PackedProduct& product,
                   PackedArgs args);
bool fp8_few_rows(const Gpu& gpu, const PackedPlan& plan, PackedArgs args, const FewChain& chain);

}  // namespace shunt::cuda_engine
