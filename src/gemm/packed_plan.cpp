// The cost model of the kernels for packed weights: product_plan.cpp's, with their constants.
#include "gemm/packed_plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "gemm/packed_model.hpp"
#include "gemm/rounding_plan.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr double many_start_us = 6;
constexpr double tall_step_clocks = 1950, low_step_clocks = 1250;  // of many_rows
constexpr double tile_end_clocks = 1800;

struct Model : PackedModel {
  using PackedModel::PackedModel;

  PackedPlan many() const {
    PackedPlan plan{.kernel = PackedPlan::many_rows, .tile_tokens = 256};
    const std::int64_t wide = ceil_div(columns, 2), clusters = gpu.multiprocessors / 2;
    const double down = std::max(1.0, mean / 256);
    const double rounds =
        std::ceil(hit * static_cast<double>(wide) * down / static_cast<double>(clusters));
    // Groups are of different sizes: tiles become tall little by little.
    const double tall = std::clamp((mean - 96) / 64, 0.0, 1.0);
    const double step = low_step_clocks + tall * (tall_step_clocks - low_step_clocks);
    const double tiles_us = rounds * us(static_cast<double>(steps) * step + tile_end_clocks);
    plan.us =
        many_start_us + std::max(memory_us(), tiles_us) + 0.1 * std::min(memory_us(), tiles_us);
    plan.blocks = static_cast<int>(2 * std::min(clusters, most_tiles(wide, 64)));
    return plan;
  }

  PackedPlan few(int tokens, int split) const {
    const double bytes = 128 * 128 + tokens * (sizes.packed_rows ? 128 : 256);
    // Four warps round the rows, a step each; rows that are fp8 already they only pass on.
    const double rows = sizes.packed_rows ? 0 : 124 * std::min<double>(planned(), tokens);
    const double step = std::max({bytes / few_bytes_a_clock, 420.0 + 8 * tokens, rows});
    PackedPlan plan = few_rows(tokens, split, step);
    if (split == 1 && tokens <= most_tokens_together) {
      plan.blocks = static_cast<int>(
          std::min(std::int64_t{few_together} * gpu.multiprocessors, most_tiles(columns, tokens)));
    }
    return plan;
  }
};

}  // namespace

PackedPlans candidates(const PackedSizes& sizes, const GpuFigures& gpu) {
  PackedPlans plans;
  if (!PackedModel::fits(sizes, gpu)) return plans;
  const Model model(sizes, gpu);
  if (!sizes.packed_out) {
    for (const int split : {1, 2, 4}) {
      if (split > 1 && (sizes.whole_k || model.steps < std::int64_t{2} * split)) continue;
      for (const int tokens : {8, 16, 32, 64}) plans.add(model.few(tokens, split));
    }
  }
  // many_rows copies fp8 in twos.
  if (sizes.packed_rows && sizes.rows_in_place && sizes.k % 2 == 0) plans.add(model.many());
  return plans;
}

PackedPlan plan_packed(const PackedSizes& sizes, const GpuFigures& gpu) {
  const PackedPlans plans = candidates(sizes, gpu);
  if (plans.size() == 0) return {};
  return *std::min_element(plans.begin(), plans.end(),
                           [](const auto& a, const auto& b) { return a.us < b.us; });
}

Rounding plan_rounding(PackedSizes gate_up, PackedSizes down, const GpuFigures& gpu) {
  const auto us = [&](PackedSizes sizes, bool rounded, bool packed_out) {
    sizes.packed_rows = sizes.rows_in_place = rounded;
    sizes.packed_out = packed_out;
    const PackedPlan plan = plan_packed(sizes, gpu);
    return plan.kernel == PackedPlan::none ? std::numeric_limits<double>::infinity() : plan.us;
  };
  // A pass reads 16 bits and writes 8.
  const auto pass_us = [&](const PackedSizes& sizes) {
    return 2 + 3.0 * static_cast<double>(sizes.rows * sizes.k) / (gpu.read_gbps * 1e3);
  };
  const double before = pass_us(gate_up) + us(down, true, false);
  const double on_the_way = us(gate_up, false, false) + us(down, false, false);
  const double between = before + us(gate_up, true, false) + pass_us(down);
  const double by_product = before + us(gate_up, true, true);
  if (on_the_way <= std::min(between, by_product)) return Rounding::on_the_way;
  return between < by_product ? Rounding::between : Rounding::by_product;
}

std::string describe(const PackedPlan& plan) {
  if (plan.kernel == PackedPlan::none) return "none of this GPU's kernels";
  return fmt::format("wgmma e4m3, tiles of {} weights x {} rows{}, {} blocks, about {:.0f} us",
                     plan.kernel == PackedPlan::many_rows ? 256 : 128, plan.tile_tokens,
                     plan.split > 1 ? fmt::format(", k over {} blocks", plan.split) : "",
                     plan.blocks, plan.us);
}

}  // namespace shunt::cuda_engine
