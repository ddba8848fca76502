// The grouped GEMM's kernels for Hopper, in 16 bits: what their launchers take.
#pragma once

#include <cmath>
#include <cstdint>

#include "activate/kernels.hpp"
#include "gemm/cuda_engine.hpp"
#include "gemm/product_plan.hpp"

namespace shunt::cuda_engine {

// What becomes of sums: the bias joins, then the activation, then one rounding.
struct Finish {
  const void* bias = nullptr;  // null: none
  DType bias_dtype = DType::f32;
  std::int64_t bias_group_stride = 0, bias_stride = 0;
  bool paired = false, activates = false;
  // Gated SiLU or no activation, out of the operands' dtype, its rows at multiples of 16 bytes:
  // from registers.
  bool plain = false;
  // Gated SiTU without limits, out of 16 bits or fewer: by the fast formula.
  bool situ = false;
  cpu_engine::ActivationRule rule;
  void* out = nullptr;
  DType out_dtype = DType::f32;
  std::int64_t out_stride = 0, out_columns = 0;
  RowPlaces places;  // of results without an activation
};

// What Finish::situ is, by the other fields.
inline bool takes_fast_situ(const Finish& f) {
  return f.paired && f.rule.kind == cpu_engine::ActivationRule::situ && f.rule.gated &&
         f.rule.limit == INFINITY && f.out_dtype != DType::f32;
}

// A bias that ends in registers can add: f32, one number behind the other.
SHUNT_BOTH constexpr bool has_simple_bias(const Finish& f) {
  return f.bias == nullptr || (f.bias_dtype == DType::f32 && f.bias_stride == 1);
}

// What both kernels know of a product, by value.
struct HopperArgs {
  int groups = 0;
  GroupWalk walk;
  int steps = 0;       // of 64 along k
  int group_rows = 0;  // of weights
  int columns = 0;     // tiles of weights a group, for a whole cluster
  // Prepared weights; null: a tensor map has them.
  const char* tiles = nullptr;
  int row_tiles = 0;  // of 128 rows, of a group
  std::int64_t group_bytes = 0;
  // Rows as few_rows gathers them.
  const char* source = nullptr;
  std::int64_t source_rows = 0, source_row_bytes = 0, k_bytes = 0;
  const std::int32_t* permutation = nullptr;
  int slots = 1;
  const float* row_scale = nullptr;  // few_rows: times row_scale[r], of the order
  bool early = false;  // offsets were there before the grid that precedes this one started
  std::uint32_t* counter = nullptr;  // of claimed tiles: tile_claims.cuh
  Finish finish;
};

GpuFigures figures(const Gpu& gpu);
// Of a compute capability: itself (90 for 9.0), or 0 where this build has no kernels of that one or
// SHUNT_CUDA_GEMM=portable keeps it from taking them.
int with_kernels(int compute);
ProductSizes sizes_of(const GroupedProduct& product);
// Enqueues the product on one of the kernels below. False: the plan, or the driver, has none of
// them; nothing was enqueued.
bool multiply_as_planned(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product);

// Enqueues the product as planned. False: there is no tensor map for it; nothing was enqueued.
bool many_rows_bf16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                    HopperArgs args);
bool many_rows_f16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                   HopperArgs args);
bool few_rows_bf16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                   HopperArgs args, const FewChain& chain);
bool few_rows_f16(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                  HopperArgs args, const FewChain& chain);

// On any GPU, for prepared weights and rows that need no conversion (mma_rows.cu). Likewise.
bool mma_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
              HopperArgs args);
// On a B200, for prepared weights (blackwell_rows.cu). Likewise.
bool blackwell_rows(const Gpu& gpu, const ProductPlan& plan, const GroupedProduct& product,
                    HopperArgs args);

}  // namespace shunt::cuda_engine
