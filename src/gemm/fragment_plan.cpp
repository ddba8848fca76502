// The cost model of the kernels for packed weights and 16-bit rows: packed_plan.cpp's, with theirs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "gemm/fragment_product.hpp"
#include "gemm/packed_model.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr double many_start_us = 5;
constexpr double many_bytes_a_clock = 18;              // that all of them get from the L2
constexpr double few_clocks = 460, token_clocks = 60;  // a step, and eight tokens more
constexpr double many_clocks = 100;  // a step beside its products: barriers, decoding
constexpr double tile_end_clocks = 5000;

struct Model : PackedModel {
  using PackedModel::PackedModel;

  double tile_bytes() const { return 128 * 128 * sizes.bits / 8; }

  PackedPlan few(int tokens, int split) const {
    const double step = std::max((tile_bytes() + tokens * 256) / few_bytes_a_clock,
                                 few_clocks + token_clocks * tokens / 8);
    return few_rows(tokens, split, step, std::ceil(planned() / tokens));
  }

  PackedPlan many(int tokens) const {
    PackedPlan plan{.kernel = PackedPlan::many_rows, .tile_tokens = tokens};
    const double down = std::ceil(planned() / tokens);
    const double tiles = static_cast<double>(hit * columns) * down;
    const double turns = std::max(1.0, tiles / gpu.multiprocessors);
    // Two warpgroups' products of 64 rows, 16 of k at once: half a clock a token.
    const double products = 8.0 * tokens * (sizes.sparse ? 0.5 : 1);
    // Rows that lie in order are shared by two blocks.
    const double bytes = tile_bytes() + tokens * (sizes.rows_in_place ? 128 : 256);
    const double step =
        std::max({products * 1.12 + many_clocks, bytes / many_bytes_a_clock, 700.0});
    const double each = static_cast<double>(steps) * step + tile_end_clocks * tokens / 256 + 1000;
    plan.us = many_start_us + std::max(memory_us(down), turns * us(each)) +
              0.1 * std::min(memory_us(down), turns * us(each));
    plan.blocks =
        static_cast<int>(std::min<std::int64_t>(gpu.multiprocessors, most_tiles(columns, tokens)));
    return plan;
  }
};

}  // namespace

PackedPlans fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu) {
  PackedPlans plans;
  if (!PackedModel::fits(sizes, gpu)) return plans;
  const Model model(sizes, gpu);
  for (const int split : {1, 2, 4}) {
    if (split > 1 && (sizes.whole_k || model.steps < std::int64_t{2} * split)) continue;
    for (const int tokens : {8, 16, 32}) plans.add(model.few(tokens, split));
  }
  // Where int4's scales join the sums depends on the kernel.
  if (!sizes.whole_k) {
    for (const int tokens : {64, 128, 192, 256}) plans.add(model.many(tokens));
  }
  return plans;
}

PackedPlan plan_fragments(const PackedSizes& sizes, const GpuFigures& gpu) {
  const PackedPlans plans = fragment_candidates(sizes, gpu);
  if (plans.size() == 0) return {};
  return *std::min_element(plans.begin(), plans.end(),
                           [](const auto& a, const auto& b) { return a.us < b.us; });
}

std::string fragment_words(const PackedPlan& plan) {
  if (plan.kernel == PackedPlan::none) return "none of this GPU's kernels";
  return fmt::format(
      "{}, weights decoded in registers, tiles of 128 weights x {} rows{}, {} "
      "blocks, about {:.0f} us",
      plan.kernel == PackedPlan::many_rows ? "wgmma" : "mma.sync", plan.tile_tokens,
      plan.split > 1 ? fmt::format(", k over {} blocks", plan.split) : "", plan.blocks, plan.us);
}

}  // namespace shunt::cuda_engine
