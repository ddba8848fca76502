// Both products of the experts' few rows in one launch on Hopper (fused_few.cuh): what it takes,
// and its plan, a pure function of sizes.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "gemm/fragment_product.hpp"
#include "gemm/fused.hpp"

namespace shunt::cuda_engine {

// How the weights of both products are prepared: RowLayout's tiles of 16 bits, or FragmentLayout's.
struct FusedForm {
  bool plain = true;
  DType dtype = DType::bf16;   // or f16: of rows
  Codes codes = Codes::nvfp4;  // not plain
  int groups = 0;              // likewise: tile_parts()
  double bits_per_weight = 16;
  bool operator==(const FusedForm&) const = default;
};

// Of one of the two products.
struct FusedSizes {
  std::int64_t group_rows = 0;  // of weights: rows of the layout
  std::int64_t k = 0;
};

struct FusedPlan {
  int unit_rows[2] = {0, 0};  // of weights that a block takes at a time: 32, 64 or 128
  int blocks = 0;             // 0: there is no plan
  int stages = 0, stage_bytes = 0;
  double us = 0;  // predicted
};

inline constexpr int fused_tokens = 8;                     // of a group that are multiplied at once
inline constexpr int most_fused_rows = most_rows_at_once;  // of all groups
inline constexpr int most_fused_stages = 30;
inline constexpr int fused_finishing = 4;  // warps that finish units, one at a time each
// Of shared memory: a step's rows; sums of a unit, of up to 8 teams with rows padded by 4; what is
// there besides the ring: alignment, sums of the units that are being finished, the list of rows.
inline constexpr int fused_pitch = 256 + 16;  // bytes from one row to the next: no bank twice
inline constexpr int fused_token_bytes = fused_tokens * fused_pitch;
inline constexpr int fused_sum_floats = fused_tokens * (256 + 4 * 8);
inline constexpr int fused_fixed_bytes =
    128 + fused_finishing * 4 * fused_sum_floats + 8 * most_fused_rows;

// A list without memory of its own: plans are made on the hot path.
class FusedPlans {
 public:
  void add(const FusedPlan& plan) { plans_[count_++] = plan; }
  const FusedPlan* begin() const { return plans_.data(); }
  const FusedPlan* end() const { return plans_.data() + count_; }

 private:
  std::array<FusedPlan, 9> plans_;
  std::size_t count_ = 0;
};

// Every plan for `rows` rows over `groups` groups; none: this GPU, or its shared memory, has no
// room for it.
FusedPlans fused_candidates(const FusedForm& form, const FusedSizes& gate_up,
                            const FusedSizes& down, int groups, std::int64_t rows,
                            const GpuFigures& gpu);
FusedPlan fastest(const FusedPlans& plans);
// "both products in one launch, units of 32 and 64 weights x 8 rows, 132 blocks, 20 stages, 12.3 us
// predicted"
std::string describe(const FusedPlan& plan);

// What the kernel knows, by value.
struct FusedPart {
  FragmentArgs of;    // plain: factors_at and unscale are not read
  int tiles_k = 0;    // plain: of 64 along k
  int unit_rows = 0;  // of weights
  int units = 0;      // of a group
};
struct FusedArgs {
  FusedPart part[2];
  // [1 + rows] zeros when the launch begins; nobody's afterwards.
  std::uint32_t* counters = nullptr;
  int stages = 0, stage_bytes = 0;
};

// Enqueues gate_up, whose out is down's rows, then down. Products of one form, groups and offsets.
void multiply_fused(const Gpu& gpu, const FusedPlan& plan, const GroupedProduct& gate_up,
                    const GroupedProduct& down, std::uint32_t* counters);
void multiply_fused(const Gpu& gpu, const FusedPlan& plan, const FragmentProduct& gate_up,
                    const FragmentProduct& down, std::uint32_t* counters);

using FusedLaunch = void(const Gpu& gpu, const FusedPlan& plan, const FusedForm& form,
                         const FusedArgs& args);
FusedLaunch fused_plain, fused_fp4, fused_sparse, fused_int4, fused_wide;

FusedForm form_of(const RowLayout& layout);
FusedForm form_of(const FragmentLayout& layout);

}  // namespace shunt::cuda_engine
