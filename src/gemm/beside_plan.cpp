#include "gemm/beside_plan.hpp"

#include <algorithm>
#include <cstdint>

#include "gemm/fragment_teams.hpp"
#include "gemm/packed_model.hpp"
#include "gemm/plan_math.hpp"

namespace shunt::cuda_engine {

namespace {

// Of a product of one group: tiles, each of 128 rows of weights, and blocks.
template <class Sizes, class Plan>
std::int64_t tiles_of(const Sizes& sizes, const Plan& plan) {
  return ceil_div(sizes.group_rows, 128) * ceil_div(sizes.rows, plan.tile_tokens);
}
template <class Sizes, class Plan>
std::int64_t blocks_of(const Sizes& sizes, const Plan& plan) {
  return plan.split * tiles_of(sizes, plan);
}

// Of plans that may be taken, the one that is least in the way; held(plan): multiprocessors. What a
// layer takes followed half of the product's own time and seven tenths of the part of the GPU's
// time that its blocks hold.
template <class Plan, class Plans, class May, class Held>
Plan least_in_the_way(const Plan& fastest, const Plans& plans, const GpuFigures& gpu,
                      const May& may, const Held& held) {
  constexpr double own = 0.5, of_the_gpu = 0.7;
  const auto cost = [&](const Plan& plan) {
    return plan.us * (own + of_the_gpu * std::min(1.0, held(plan) / gpu.multiprocessors));
  };
  Plan best = fastest;
  for (const Plan& plan : plans) {
    // Of equal ones the later: more parts of k.
    if (may(plan) && (!may(best) || cost(plan) <= cost(best))) best = plan;
  }
  return best;
}

// Of kernels for few rows alone, with no more blocks than tiles; held(plan, blocks).
template <class Plan, class Plans, class Sizes, class Held>
Plan few_rows_beside(const Plan& fastest, const Plans& plans, const Sizes& sizes,
                     const GpuFigures& gpu, const Held& held) {
  if (fastest.kernel != Plan::few_rows) return fastest;
  Plan best = least_in_the_way(
      fastest, plans, gpu, [](const Plan& plan) { return plan.kernel == Plan::few_rows; },
      [&](const Plan& plan) { return held(plan, static_cast<double>(blocks_of(sizes, plan))); });
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
  return few_rows_beside(plan_product(sizes, gpu), plans, sizes, gpu,
                         [](const ProductPlan&, double blocks) { return blocks; });
}

PackedPlan plan_beside(const PackedSizes& sizes, const GpuFigures& gpu) {
  constexpr std::int64_t too_few = 8;  // whose layers are slower by it
  const PackedPlan fastest = plan_packed(sizes, gpu);
  if (sizes.rows <= too_few) return fastest;
  return few_rows_beside(
      fastest, candidates(sizes, gpu), sizes, gpu, [](const PackedPlan& plan, double blocks) {
        const bool together = plan.split == 1 && plan.tile_tokens <= most_tokens_together;
        return together ? blocks / few_together : blocks;
      });
}

PackedPlan plan_fragments_beside(const PackedSizes& sizes, const GpuFigures& gpu) {
  constexpr std::int64_t fewest_rows = 16, most_rows = 256;  // others' layers were slower by it
  constexpr double other_tile_us = 2;                        // for a second kernel's code
  const PackedPlan fastest = plan_fragments(sizes, gpu);
  const bool hopper = fastest.kernel == PackedPlan::few_rows ||
                      fastest.kernel == PackedPlan::many_rows;  // timed there alone
  if (!hopper || sizes.rows < fewest_rows || sizes.rows > most_rows) return fastest;
  PackedPlans plans;
  for (PackedPlan plan : fragment_candidates(sizes, gpu)) {
    if (sizes.tile_before > 0 && plan.tile_tokens != sizes.tile_before) plan.us += other_tile_us;
    plans.add(plan);
  }
  return least_in_the_way(
      fastest, plans, gpu, [](const PackedPlan& plan) { return plan.split <= few_teams; },
      [&](const PackedPlan& plan) {
        if (plan.kernel != PackedPlan::few_rows) return static_cast<double>(plan.blocks);
        // Teams of different blocks first: a block for each tile, as far as there are any.
        return static_cast<double>(std::min<std::int64_t>(plan.blocks, tiles_of(sizes, plan)));
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

void multiply_beside(const Gpu& gpu, const FragmentProduct& given, void* memory) {
  if (given.out.elements() == 0) return;
  const FragmentProduct p = given.layout.format.ordered ? order_rows(gpu, given, memory) : given;
  const PackedPlan plan = plan_fragments_beside(sizes_of(p), figures(gpu));
  if (!multiply_as_planned(gpu, plan, p)) multiply_fragments(gpu, given, memory);
}

}  // namespace shunt::cuda_engine
