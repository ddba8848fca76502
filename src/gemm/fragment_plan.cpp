// The cost model of the kernels for packed weights and 16-bit rows: packed_plan.cpp's, with theirs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "gemm/fragment_product.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr double start_us = 4, many_start_us = 5;
constexpr double memory_share = 0.94;                  // of what memory's clock says
constexpr double few_bytes_a_clock = 36;               // that one block streams at most
constexpr double many_bytes_a_clock = 18;              // that all of them get from the L2
constexpr double few_clocks = 460, token_clocks = 60;  // a step, and eight tokens more
constexpr double many_clocks = 100;  // a step beside its products: barriers, decoding
constexpr double tile_end_clocks = 5000;
constexpr double split_us = 3;
constexpr std::int64_t most_groups = 1024;            // that the kernels list
constexpr std::int64_t most = std::int64_t{1} << 30;  // of rows, coordinates and tiles in 32 bits

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Model {
  const PackedSizes& sizes;
  const GpuFigures& gpu;
  std::int64_t expected, hit, steps, columns;  // rows, groups that have some, steps, tiles
  double mean;                                 // rows of a group

  Model(const PackedSizes& s, const GpuFigures& g)
      : sizes(s),
        gpu(g),
        expected(s.expected > 0 ? s.expected : s.rows),
        hit(std::min<std::int64_t>(s.groups, expected)),
        steps(ceil_div(s.k, 128)),
        columns(ceil_div(s.group_rows, 128)),
        mean(static_cast<double>(expected) / static_cast<double>(std::max<std::int64_t>(1, hit))) {}

  double us(double clocks) const { return clocks / (gpu.clock_ghz * 1e3); }
  // Groups of more rows than a tile read their weights again, from the L2 mostly.
  double memory_us(double again) const {
    const double weights =
        static_cast<double>(hit * sizes.group_rows) * static_cast<double>(sizes.k) * sizes.bits / 8;
    const double bytes = weights * (1 + 0.3 * (again - 1)) +
                         static_cast<double>(expected * sizes.k) * 2 +
                         static_cast<double>(expected * sizes.group_rows) * 2;
    return bytes / (gpu.read_gbps * memory_share * 1e3);
  }
  double planned() const { return sizes.groups > 1 ? mean + std::sqrt(mean) / 2 : mean; }
  std::int64_t most_tiles(int tokens) const {
    return columns * (ceil_div(sizes.rows, tokens) + hit);
  }
  double tile_bytes() const { return 128 * 128 * sizes.bits / 8; }

  PackedPlan few(int tokens, int split) const {
    PackedPlan plan{.kernel = PackedPlan::few_rows, .tile_tokens = tokens, .split = split};
    const double down = std::ceil(planned() / tokens);
    const double step = std::max((tile_bytes() + tokens * 256) / few_bytes_a_clock,
                                 few_clocks + token_clocks * tokens / 8);
    const double tiles = static_cast<double>(hit * columns) * down;
    const std::int64_t clusters =
        split <= 2 ? gpu.multiprocessors / split : gpu.multiprocessors / 16 * (16 / split);
    const double turns = std::max(1.0, tiles / static_cast<double>(clusters));
    const double each = static_cast<double>(ceil_div(steps, split)) * step + 800;
    plan.us = start_us + split_us * (split == 4 ? 3 : split - 1) +
              std::max(memory_us(down), turns * us(each));
    plan.blocks = static_cast<int>(split * std::min(clusters, most_tiles(tokens)));
    return plan;
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
    plan.blocks = static_cast<int>(std::min<std::int64_t>(gpu.multiprocessors, most_tiles(tokens)));
    return plan;
  }
};

}  // namespace

PackedPlans fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu) {
  PackedPlans plans;
  const bool hopper = gpu.compute == 90 && gpu.shared_bytes >= 227 * 1024 &&
                      gpu.largest_cluster >= 8 && gpu.multiprocessors >= 16;
  const bool fits = sizes.k > 0 && sizes.groups >= 1 && sizes.groups <= most_groups &&
                    sizes.rows > 0 && sizes.group_rows > 0 && sizes.rows < most && sizes.k < most &&
                    sizes.group_rows < most / sizes.groups &&
                    (sizes.rows / 8 + sizes.groups) < most / ceil_div(sizes.group_rows, 128);
  if (!hopper || !fits) return plans;
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
