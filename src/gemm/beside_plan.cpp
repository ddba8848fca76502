#include "gemm/beside_plan.hpp"

#include <algorithm>
#include <cstdint>

#include "gemm/packed_model.hpp"
#include "gemm/plan_math.hpp"

namespace shunt::cuda_engine {

namespace {

// Blocks of a product of one group; a tile has 128 rows of weights.
template <class Sizes, class Plan>
std::int64_t blocks_of(const Sizes& sizes, const Plan& plan) {
  return plan.split * ceil_div(sizes.group_rows, 128) * ceil_div(sizes.rows, plan.tile_tokens);
}

// held(plan, blocks): multiprocessors. What a layer takes followed half of the product's own time
// and seven tenths of the part of the GPU's time that its blocks hold.
template <class Plan, class Plans, class Sizes, class Held>
Plan least_in_the_way(const Plan& fastest, const Plans& plans, const Sizes& sizes,
                      const GpuFigures& gpu, const Held& held) {
  constexpr double own = 0.5, of_the_gpu = 0.7;
  if (fastest.kernel != Plan::few_rows) return fastest;
  const auto cost = [&](const Plan& plan) {
    const double part =
        held(plan, static_cast<double>(blocks_of(sizes, plan))) / gpu.multiprocessors;
    return plan.us * (own + of_the_gpu * std::min(1.0, part));
  };
  Plan best = fastest;
  for (const Plan& plan : plans) {
    if (plan.kernel == Plan::few_rows && cost(plan) < cost(best)) best = plan;
  }
  best.blocks = static_cast<int>(std::min<std::int64_t>(best.blocks, blocks_of(sizes, best)));
  return best;
}

}  // namespace

ProductPlan plan_beside(const ProductSizes& sizes, const GpuFigures& gpu) {
  // What four blocks a tile cost beyond two was measured where their clusters did not all fit.
  constexpr double fitting_clusters_us = -4.5;
  ProductPlans plans;
  for (ProductPlan plan : candidates(sizes, gpu)) {
    const int in_clusters = gpu.multiprocessors / 16 * 16;
    const bool fit = blocks_of(sizes, plan) <= in_clusters;
    if (plan.split == 4 && fit) plan.us += fitting_clusters_us;
    plans.add(plan);
  }
  return least_in_the_way(plan_product(sizes, gpu), plans, sizes, gpu,
                          [](const ProductPlan&, double blocks) { return blocks; });
}

PackedPlan plan_beside(const PackedSizes& sizes, const GpuFigures& gpu) {
  constexpr std::int64_t too_few = 8;  // whose layers are slower by it
  const PackedPlan fastest = plan_packed(sizes, gpu);
  if (sizes.rows <= too_few) return fastest;
  return least_in_the_way(
      fastest, candidates(sizes, gpu), sizes, gpu, [](const PackedPlan& plan, double blocks) {
        const bool together = plan.split == 1 && plan.tile_tokens <= most_tokens_together;
        return together ? blocks / few_together : blocks;
      });
}

void multiply_beside(const Gpu& gpu, const GroupedProduct& p) {
  if (!multiply_as_planned(gpu, plan_beside(sizes_of(p), figures(gpu)), p)) multiply_groups(gpu, p);
}

void multiply_beside(const Gpu& gpu, const PackedProduct& p) {
  if (p.out.elements() == 0) return;
  const PackedPlan plan = plan_beside(sizes_of(p), figures(gpu));
  if (!multiply_as_planned(gpu, plan, p)) multiply_packed(gpu, p);
}

}  // namespace shunt::cuda_engine
