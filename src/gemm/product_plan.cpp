// The cost model of the grouped GEMM's kernels.
//
// Three things go on at once. Memory: a launch reads the weights of the groups that can be hit,
// rows and results once. The pipe: a tile's step of 64 along k takes as long as its products or its
// bytes from the L2, whichever is longer; tiles go round by round over the multiprocessors. Power:
// what is multiplied, at the rate that the power limit leaves. They hinder each other where they
// take about as long: the norm of degree 4 says how much, to some 7 % of what was measured.
// Rows of a group are taken to spread by the square root.
#include "gemm/product_plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "gemm/mma_tiles.hpp"
#include "gemm/plan_math.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr double start_us = 3;  // launch, group walk, first loads, last stores
constexpr double many_start_us = 6;
constexpr double memory_share = 0.95;    // of what memory's clock says
constexpr double tensor_share = 0.68;    // that the power limit leaves at 4096 operations a clock
constexpr double copy_power = 0.15;      // of what products take: a byte copied for each
constexpr double l2_bytes_a_clock = 40;  // a multiprocessor
constexpr double at_once_bytes_a_clock = 64;  // likewise, where one copy brings a tile's rows
constexpr double at_once_power = 0.6;         // and of copy_power
constexpr double passed_bytes_a_clock = 20;   // of gathered rows, from block to block of a cluster
constexpr double gathered_share = 1.021;      // of a product's time, with rows gathered on the way
constexpr double together_clocks = 3500;      // a tile's end and the next one's start
constexpr double in_turn_clocks = 1000;
constexpr double few_bytes_a_clock = 36;                     // that one block streams at most
constexpr double few_end_clocks = 600, few_row_clocks = 20;  // of a tile's end, and a row of it
constexpr double split_us = 3;                               // for each time that k is halved
constexpr double eighths[] = {-1.65, -0.9, -0.49, -0.16,     // of a normal distribution: means
                              0.16,  0.49, 0.9,   1.65};
constexpr double many_uneven = 0.3;       // as plan_math.hpp's `uneven`
constexpr double many_reads_again = 0.1;  // and reads_of_weights(), by what was timed
constexpr double other_kernel_us = 5;  // for code to be fetched: cuda-layer.md, "Code that is .."
constexpr int most_groups = 1024;      // that the kernels list

struct Model {
  const ProductSizes& sizes;
  const GpuFigures& gpu;
  std::int64_t expected, hit, steps;  // rows, groups that have some, steps along k
  double mean;                        // rows of a group

  Model(const ProductSizes& s, const GpuFigures& g)
      : sizes(s),
        gpu(g),
        expected(s.expected > 0 ? s.expected : s.rows),
        hit(std::min<std::int64_t>(s.groups, expected)),
        steps(ceil_div(s.k, 64)),
        mean(static_cast<double>(expected) / static_cast<double>(std::max<std::int64_t>(1, hit))) {}

  double us(double clocks) const { return clocks / (gpu.clock_ghz * 1e3); }
  double memory_us() const { return memory_us(static_cast<double>(hit)); }
  // `reads`: how often a group's weights cross memory.
  double memory_us(double groups, double reads = 1) const {
    const double bytes =
        groups * static_cast<double>(sizes.group_rows) * static_cast<double>(sizes.k) * reads +
        static_cast<double>(expected) * static_cast<double>(sizes.k + sizes.group_rows);
    return 2 * bytes / (gpu.read_gbps * memory_share * 1e3);
  }
  // Two things of a tile at once: the longer, and a tenth of the other that does not overlap.
  static double both(double a, double b) { return std::max(a, b) + 0.1 * std::min(a, b); }
  // Things of a whole launch at once.
  static double all(double a, double b, double c) {
    const auto fourth = [](double x) { return x * x * x * x; };
    return std::sqrt(std::sqrt(fourth(a) + fourth(b) + fourth(c)));
  }
  // Rows that a group is planned for.
  double planned() const { return mean + deviation(sizes.groups, mean, uniform) / 2; }

  // in_turn: a tile's end passes while another tile is multiplied.
  ProductPlan many(int rows, int tokens, bool in_turn) const {
    constexpr int cluster = 2;
    ProductPlan plan{.kernel = ProductPlan::many_rows, .tile_tokens = tokens, .tile_rows = rows};
    const std::int64_t columns = ceil_div(sizes.group_rows, std::int64_t{cluster} * rows);
    // Of a group and a column: tiles, units of 64 rows, clocks; bytes copied in a step, and
    // products.
    double tiles = 0, units = 0, clocks = 0, copied = 0, multiplied = 0;
    const double spread = deviation(sizes.groups, mean, many_uneven);
    for (const double away : eighths) {
      const double rows_here = std::max(1.0, mean + away * spread);
      const double down = std::ceil(rows_here / tokens);
      // Rows are loaded in steps of 16, and multiplied so from 32 on. In place steps of 64 are
      // counted: with those of 16 the plan took slower tiles than it does
      // (docs/notes/cuda-gemm.md).
      const double wide = std::max(32.0, std::ceil(rows_here / 16) * 16 / down);
      const double loaded = sizes.gathered ? wide : std::ceil(wide / 64) * 64;
      const double here = wide * down / 64;
      const double products = rows * wide * 64 * 2 / (4096 * 0.95);
      const bool at_once = in_turn && !sizes.gathered && wide > tokens - 64;
      const double bytes = rows * 128 + loaded / cluster * 128;
      double loads = bytes / (at_once ? at_once_bytes_a_clock : l2_bytes_a_clock);
      if (sizes.gathered) loads += loaded / cluster * 128 / passed_bytes_a_clock;
      tiles += down / std::size(eighths);
      units += here / std::size(eighths);
      copied += (at_once ? at_once_power : 1) * down * bytes;
      multiplied += down * rows * wide;
      clocks += down / std::size(eighths) *
                (static_cast<double>(steps) * both(products, loads) +
                 (in_turn ? in_turn_clocks : together_clocks));
    }
    const std::int64_t clusters = gpu.multiprocessors / cluster;
    const double each = static_cast<double>(hit * columns);
    const double rounds = std::ceil(each * tiles / static_cast<double>(clusters));
    const double operations =
        each * cluster * rows * units * 64 * static_cast<double>(steps) * 64 * 2;
    // Copies take power from products; 128 x 256 has a byte for each.
    const double power = (1 + copy_power * (copied / multiplied - 1)) *
                         us(operations / (4096 * tensor_share * gpu.multiprocessors));
    const double reads = 1 + many_reads_again * (tiles - 1);
    plan.us = many_start_us +
              all(memory_us(static_cast<double>(hit), reads), us(rounds * clocks / tiles), power);
    if (sizes.gathered) plan.us *= gathered_share;
    const std::int64_t most =
        columns * (ceil_div(sizes.rows, tokens) + std::min<std::int64_t>(sizes.groups, sizes.rows));
    plan.blocks = static_cast<int>(cluster * std::min(clusters, most));
    return plan;
  }

  ProductPlan few(int tokens, int split) const {
    ProductPlan plan{
        .kernel = ProductPlan::few_rows, .tile_tokens = tokens, .tile_rows = 128, .split = split};
    const std::int64_t columns = ceil_div(sizes.group_rows, 128);
    const double down = tiles_of_group(sizes.groups, mean, tokens);
    const double bytes = 128 * 128 + tokens * 128;
    const double step = std::max(bytes / few_bytes_a_clock, 400.0 + 2 * tokens);
    const double tiles = static_cast<double>(hit * columns) * down;
    // Multiprocessors form clusters in groups of 16 or 18.
    const std::int64_t clusters =
        split <= 2 ? gpu.multiprocessors / split : gpu.multiprocessors / 16 * (16 / split);
    const double rounds = tiles / static_cast<double>(clusters);
    // Blocks without a tile leave more of the memory to the others: only the first round is whole.
    const double turns = std::max(1.0, rounds);
    const double each = static_cast<double>(ceil_div(steps, split)) * step + few_end_clocks +
                        few_row_clocks * mean / std::max(1.0, mean / tokens);
    plan.us = start_us + split_us * (split == 4 ? 3 : split - 1) +
              all(memory_us(static_cast<double>(hit), reads_of_weights(down)), turns * us(each), 0);
    const std::int64_t most =
        columns * (ceil_div(sizes.rows, tokens) + std::min<std::int64_t>(sizes.groups, sizes.rows));
    plan.blocks = static_cast<int>(split * std::min(clusters, most));
    return plan;
  }

  // blackwell_rows.cu as its contract predicts it.
  ProductPlan blackwell() const {
    ProductPlan plan{.kernel = ProductPlan::blackwell, .tile_tokens = 256, .tile_rows = 128};
    const std::int64_t columns = ceil_div(sizes.group_rows, 128);
    const double tiles = static_cast<double>(hit * columns) * std::max(1.0, mean / 256);
    const double rounds = std::ceil(tiles / gpu.multiprocessors);
    const double wide = std::min<double>(256, std::ceil(planned() / 64) * 64);
    plan.us =
        many_start_us +
        std::max(memory_us(), rounds * us(static_cast<double>(steps) * (16384 + wide * 128) / 64));
    const std::int64_t most =
        columns * (ceil_div(sizes.rows, 256) + std::min<std::int64_t>(sizes.groups, sizes.rows));
    plan.blocks = static_cast<int>(std::min<std::int64_t>(gpu.multiprocessors, most));
    return plan;
  }

  // grouped_cuda.cu, which takes everything.
  ProductPlan plain() const {
    ProductPlan plan;
    const double operations = 2.0 * static_cast<double>(expected) *
                              static_cast<double>(sizes.group_rows) * static_cast<double>(sizes.k);
    const double a_clock = sizes.dtype == DType::f32 ? 200 : 1200;  // and multiprocessor
    plan.us =
        start_us + std::max(1.5 * memory_us(), us(operations / (a_clock * gpu.multiprocessors)));
    return plan;
  }

  // mma_rows.cu.
  ProductPlan portable(const MmaTiles& tiles) const {
    ProductPlan plan{.tile_tokens = tiles.tokens, .tile_rows = tiles.weights};
    const std::int64_t columns = ceil_div(sizes.group_rows, tiles.weights);
    const double groups = groups_with_rows(sizes.groups, static_cast<double>(expected));
    const double rows = static_cast<double>(expected) / groups;
    double down = 0;
    for (const double away : eighths) {
      const double here = rows + away * deviation(sizes.groups, rows, uniform);
      down += std::ceil(std::max(1.0, here) / tiles.tokens) / std::size(eighths);
    }
    const double rounds =
        std::max(1.0, groups * static_cast<double>(columns) * down / gpu.multiprocessors);
    const double each = static_cast<double>(steps) * tiles.step_clocks + tiles.end_clocks;
    plan.us = start_us + all(memory_us(groups), us(rounds * each), 0);
    const std::int64_t most = columns * (ceil_div(sizes.rows, tiles.tokens) +
                                         std::min<std::int64_t>(sizes.groups, sizes.rows));
    const int room =
        std::min(tiles.blocks, (gpu.shared_bytes + 1024) / (tiles.shared_bytes + 1024));
    plan.blocks = static_cast<int>(
        std::min<std::int64_t>(std::int64_t{std::max(1, room)} * gpu.multiprocessors, most));
    return plan;
  }
};

// What the kernels for prepared weights of 16 bits can have.
bool fits(const ProductSizes& sizes) {
  constexpr std::int64_t most = std::int64_t{1} << 30;  // of rows, coordinates and tiles in 32 bits
  return (sizes.dtype == DType::bf16 || sizes.dtype == DType::f16) && sizes.in_place &&
         sizes.k > 0 && sizes.groups <= most_groups && sizes.rows > 0 && sizes.group_rows > 0 &&
         sizes.rows < most && sizes.k < most && sizes.group_rows < most / sizes.groups &&
         (sizes.rows / 8 + sizes.groups) < most / ceil_div(sizes.group_rows, 128);
}

// `besides`: what a plan costs a layer beside its own time.
template <class Besides>
ProductPlan fastest(const ProductPlan* begin, const ProductPlan* end, const Besides& besides) {
  const auto us = [&](const ProductPlan& plan) { return plan.us + besides(plan); };
  return *std::min_element(begin, end, [&](const auto& a, const auto& b) { return us(a) < us(b); });
}

double pass_us(double bytes, const GpuFigures& gpu) { return 2 + bytes / (gpu.read_gbps * 1e3); }

}  // namespace

ProductPlans portable_candidates(const ProductSizes& sizes, const GpuFigures& gpu) {
  ProductPlans plans;
  const Model model(sizes, gpu);
  if (fits(sizes)) {
    for (const MmaTiles& tiles : mma_tiles) {
      if (tiles.shared_bytes <= gpu.shared_bytes) plans.add(model.portable(tiles));
    }
  }
  if (plans.size() == 0) plans.add(model.plain());
  return plans;
}

ProductPlans candidates(const ProductSizes& sizes, const GpuFigures& gpu) {
  ProductPlans plans;
  const Model model(sizes, gpu);
  const bool hopper = gpu.compute == 90 && gpu.shared_bytes >= 227 * 1024 &&
                      gpu.largest_cluster >= 8 && gpu.multiprocessors >= 8;
  const bool can = fits(sizes);
  // Rows that a pass weighs, for kernels of many rows, are rounded once more: not the same bits.
  const bool weighs_sums = !sizes.weighed || !sizes.whole_k;
  if (hopper && can && weighs_sums) {
    for (const int split : {1, 2, 4}) {
      for (const int tokens : {8, 16, 32, 64}) {
        if (split > 1 && (sizes.whole_k || model.steps < std::int64_t{4} * split)) continue;
        plans.add(model.few(tokens, split));
      }
    }
    if (!sizes.weighed) {
      plans.add(model.many(128, 256, false));
      plans.add(model.many(256, 128, false));
      plans.add(model.many(128, 192, true));
    }
  }
  if (gpu.compute == 100 && gpu.shared_bytes >= 227 * 1024 && can && !sizes.gathered &&
      !sizes.weighed) {
    plans.add(model.blackwell());
  }
  const ProductPlans portable = portable_candidates(sizes, gpu);
  plans.add(fastest(portable.begin(), portable.end(), [](const ProductPlan&) { return 0.0; }));
  return plans;
}

ProductPlan plan_product(const ProductSizes& sizes, const GpuFigures& gpu) {
  const ProductPlans plans = candidates(sizes, gpu);
  if (plans.size() == 1) return *plans.begin();
  // Of those that can, the portable kernel is never the fastest, whatever the model says.
  const double moved = 2 * 2 * static_cast<double>(sizes.rows * sizes.group_rows);
  return fastest(plans.begin(), plans.end() - 1, [&](const ProductPlan& plan) {
    const bool few = plan.kernel == ProductPlan::few_rows;
    const bool other = sizes.few_before > 0 && (!few || plan.tile_tokens != sizes.few_before);
    return (other ? other_kernel_us : 0) + (few && sizes.placed ? pass_us(moved, gpu) : 0);
  });
}

bool gather_first(ProductSizes sizes, const GpuFigures& gpu) {
  const bool weighed = sizes.weighed;
  sizes.gathered = sizes.weighed = false;
  const ProductPlan after = plan_product(sizes, gpu);
  if (after.kernel == ProductPlan::portable) return false;
  constexpr double surely = 1.01;  // predictions that are closer say nothing
  // Read and written.
  const double bytes = 2 * 2 * static_cast<double>(sizes.rows * sizes.k);
  sizes.gathered = true;
  sizes.weighed = weighed;
  const ProductPlan on_the_way = plan_product(sizes, gpu);
  // With more rows a group steps that pass them on take half as long again, which is not predicted.
  constexpr std::int64_t most_on_the_way = 128;
  const bool few = sizes.rows <= most_on_the_way * sizes.groups;
  return on_the_way.kernel == ProductPlan::portable || !few ||
         (after.us + pass_us(bytes, gpu)) * surely < on_the_way.us;
}

std::string describe(const ProductPlan& plan) {
  if (plan.kernel == ProductPlan::portable) {
    return fmt::format("tiles of {} weights x {} rows, about {:.0f} us", plan.tile_rows,
                       plan.tile_tokens, plan.us);
  }
  return fmt::format(
      "{}, tiles of {} weights x {} rows{}, {} blocks, about {:.0f} us",
      plan.kernel == ProductPlan::blackwell ? "tcgen05" : "wgmma", plan.tile_rows, plan.tile_tokens,
      plan.split > 1 ? fmt::format(", k over {} blocks", plan.split) : "", plan.blocks, plan.us);
}

}  // namespace shunt::cuda_engine
