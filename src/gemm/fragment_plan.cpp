// The cost model of the kernels for packed weights and 16-bit rows: packed_plan.cpp's, with theirs.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "gemm/fragment_product.hpp"
#include "gemm/fragment_teams.hpp"
#include "gemm/mma_fragment_tiles.hpp"
#include "gemm/packed_model.hpp"

namespace shunt::cuda_engine {

namespace {

constexpr double many_start_us = 5;
constexpr double many_bytes_a_clock = 18;  // that all of them get from the L2
// Of tiles of 128 rows of weights: a step, and what a token takes of it, at the clock that power
// leaves; a tile's end.
constexpr double many_clocks = 1350, many_token_clocks = 6.4;
constexpr double many_end_clocks = 500, many_end_token_clocks = 8;
// Of tiles of 256 rows of weights, likewise; tokens that are not mapped, and those that two blocks
// share; one loop for all widths; a tile's end.
constexpr double middle_clocks = 1150, middle_token_clocks = 14.8, one_loop = 1.05;
constexpr double gathered_steps = 1.02, shared_steps = 0.97;
constexpr double middle_end_clocks = 1000, middle_end_token_clocks = 45;
// Of few rows: what eight tokens more take a step, a tile's end, and adding sums of teams and of
// blocks.
constexpr double few_launch_us = 5, eight_clocks = 120, few_end_clocks = 300;
constexpr double share_us = 1.5, cluster_us = 3;
// What dense3's numbers take more: of few rows, a step and eight tokens; of tiles of 256 rows of
// weights and of 128, a step.
constexpr double few_look_up_clocks = 165, eight_look_up_clocks = 45;
constexpr double middle_look_up_clocks = 320, one_loop_look_up = 0.05;
constexpr double many_look_up_clocks = 350;
// Of tiles that any GPU runs, of few and of many rows: a step, what a token takes of it, a tile's
// end with the next one's beginning, by the tokens that it has room for and by those that it has,
// on a multiprocessor whose blocks are all at work; and what dense3's numbers take more of a step
// (docs/notes/cuda-layer.md, "Packed weights on other GPUs").
struct PortableClocks {
  double step, token, end_room, end_token, look_up;
};
constexpr PortableClocks portable_few{500, 12, 19, 45, 300}, portable_many{850, 9.8, 70, 25, 0};

struct Model : PackedModel {
  using PackedModel::PackedModel;

  double tile_bytes() const { return 128 * 128 * sizes.bits / 8; }
  double looked_up(double more) const { return sizes.looked_up ? more : 0; }

  // Tokens that a tile of up to `tokens` multiplies, in the mean: the last one of a group at least
  // `least`, in steps of `more`.
  double width_of_tile(int tokens, double least, double more) const {
    double tiles = 0, wide = 0;
    for (const double away : {-1.3, -0.3, 0.3, 1.3}) {  // means of a normal distribution's quarters
      const double rows = std::max(1.0, mean + away * deviation(sizes.groups, mean, uniform));
      const double whole = std::ceil(rows / tokens) - 1, rest = rows - whole * tokens;
      tiles += whole + 1;
      wide += whole * tokens + std::clamp(std::ceil(rest / more) * more, least, 1.0 * tokens);
    }
    return wide / tiles;
  }

  PackedPlan few(int tokens, int split) const {
    PackedPlan plan{.kernel = PackedPlan::few_rows, .tile_tokens = tokens, .split = split};
    const int share = teams_of_tile(plan), cluster = split / share;
    const auto clusters = static_cast<double>(
        cluster <= 2 ? gpu.multiprocessors / cluster : gpu.multiprocessors / 16 * (16 / cluster));
    const double down = tiles_of_group(sizes.groups, mean, tokens);
    const double tiles = hit * static_cast<double>(columns) * down;
    // A tile multiplies as many eights of tokens as it has.
    const double eights = std::clamp((mean / down + 4) / 8, 1.0, tokens / 8.0);
    // With all teams at work, and a team alone, whose few stages memory has to fill.
    const double clocks = (tokens == 8 ? 550 : 590) + looked_up(few_look_up_clocks),
                 more_clocks = eight_clocks + looked_up(eight_look_up_clocks),
                 team_clocks = tokens == 8 ? 900 : 1280;
    const double step = std::max((tile_bytes() + tokens * 256) / few_bytes_a_clock,
                                 (clocks + more_clocks * (eights - 1)) * (sizes.sparse ? 0.8 : 1));
    // A block's tiles, and those of a team one after the other.
    const double most = most_of(tiles / clusters);
    const double turns = std::ceil(tiles * share / (few_teams * clusters));
    const double all = most * (static_cast<double>(steps) / cluster * step + few_end_clocks);
    const double team = turns * static_cast<double>(ceil_div(steps, split)) * team_clocks;
    const double products = us(std::max(all, team)), memory = memory_us(down);
    plan.us = few_launch_us + (share > 1 ? share_us * turns : 0) + (cluster > 1 ? cluster_us : 0) +
              both(memory, products);
    plan.blocks = static_cast<int>(
        cluster * std::min(static_cast<std::int64_t>(clusters), most_tiles(columns, tokens)));
    return plan;
  }

  // A block's tiles of `tiles`, of which some have one more than others.
  static double most_of(double each) {
    return each < 4 ? std::ceil(each) : each < 8 ? each + 0.4 : each;
  }

  // Many rows in tiles of up to 160, fragment_middle_rows.cuh's.
  PackedPlan middle(int tokens) const {
    PackedPlan plan{.kernel = PackedPlan::many_rows, .tile_tokens = tokens};
    const double down = tiles_of_group(sizes.groups, mean, tokens, uniform);
    const bool shared = sizes.rows_in_place && blocks_share(columns, steps);
    const std::int64_t wide = ceil_div(columns, 2);
    const double tiles = hit * static_cast<double>(wide) * down;
    const double rows = mean / down;
    const double width = tokens == 64    ? width_of_tile(64, 16, 16)
                         : tokens == 160 ? width_of_tile(160, 112, 16)
                         : sizes.sparse  ? width_of_tile(128, 80, 16)
                                         : width_of_tile(128, 96, 32);
    const double products =
        (middle_clocks + looked_up(middle_look_up_clocks) + middle_token_clocks * width) *
        (tokens == 160 ? one_loop + looked_up(one_loop_look_up) : 1) *
        (shared                ? shared_steps
         : sizes.rows_in_place ? 1
                               : gathered_steps) *
        (sizes.sparse ? 0.8 : 1);
    const double bytes = 2 * tile_bytes() + rows * (shared ? 128 : 256);
    const double step = std::max(products, bytes / many_bytes_a_clock);
    const double each =
        static_cast<double>(steps) * step + middle_end_clocks + middle_end_token_clocks * rows;
    const double all = us(most_of(tiles / gpu.multiprocessors) * each), memory = memory_us(down);
    plan.us = many_start_us + both(memory, all);
    plan.blocks =
        static_cast<int>(std::min<std::int64_t>(gpu.multiprocessors, most_tiles(wide, tokens)));
    return plan;
  }

  PackedPlan portable(bool many) const {
    const int tokens = mma_fragment_tokens(many, sizes.looked_up);
    PackedPlan plan{.kernel = PackedPlan::portable, .tile_tokens = tokens};
    const double down = tiles_of_group(sizes.groups, mean, tokens);
    const double tiles = hit * static_cast<double>(columns) * down;
    const double turns = std::max(1.0, tiles / gpu.multiprocessors);
    const double width = many ? tokens : width_of_tile(tokens, tokens / 2.0, tokens / 2.0);
    const PortableClocks& clocks = many ? portable_many : portable_few;
    const double step =
        (clocks.step + looked_up(clocks.look_up) + clocks.token * width) * (sizes.sparse ? 0.8 : 1);
    const double each = static_cast<double>(steps) * step + clocks.end_room * tokens +
                        clocks.end_token * mean / down;
    plan.us = few_launch_us + both(memory_us(down), turns * us(each));
    const int stage = static_cast<int>(tile_bytes()) + tokens * 256,
              book = sizes.looked_up ? 64 * 1024 : 0;
    const int bytes = mma_fragment_stages(stage, book) * stage + book + 1024;
    const int blocks =
        std::clamp((gpu.shared_bytes + 1024) / bytes, 1, mma_fragment_blocks(tokens));
    plan.blocks = static_cast<int>(
        std::min(std::int64_t{blocks} * gpu.multiprocessors, most_tiles(columns, tokens)));
    return plan;
  }

  PackedPlan many(int tokens) const {
    PackedPlan plan{.kernel = PackedPlan::many_rows, .tile_tokens = tokens};
    const double down = tiles_of_group(sizes.groups, mean, tokens, uniform);
    const double tiles = hit * static_cast<double>(columns) * down;
    const double turns = std::max(1.0, tiles / gpu.multiprocessors);
    const double width = width_of_tile(tokens, 128, 32);
    const double products =
        (many_clocks + looked_up(many_look_up_clocks) + many_token_clocks * width) *
        (sizes.sparse ? 0.8 : 1);
    // Rows that lie in order are shared by two blocks.
    const double bytes = tile_bytes() + width * (sizes.rows_in_place ? 128 : 256);
    const double step = std::max(products, bytes / many_bytes_a_clock);
    const double each =
        static_cast<double>(steps) * step + many_end_clocks + many_end_token_clocks * width;
    plan.us = many_start_us + both(memory_us(down), turns * us(each));
    plan.blocks =
        static_cast<int>(std::min<std::int64_t>(gpu.multiprocessors, most_tiles(columns, tokens)));
    return plan;
  }
};

}  // namespace

PackedPlans portable_fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu) {
  PackedPlans plans;
  if (!PackedModel::countable(sizes)) return plans;
  const Model model(sizes, gpu);
  for (const bool many : {false, true}) plans.add(model.portable(many));
  return plans;
}

PackedPlans fragment_candidates(const PackedSizes& sizes, const GpuFigures& gpu) {
  if (!PackedModel::fits(sizes, gpu)) return portable_fragment_candidates(sizes, gpu);
  PackedPlans plans;
  const Model model(sizes, gpu);
  for (const int split : {1, 2, 4, 8}) {
    if (split > 1 && (sizes.whole_k || model.steps < std::int64_t{2} * split)) continue;
    for (const int tokens : {8, 24}) plans.add(model.few(tokens, split));
  }
  // Where scales join the sums may depend on the kernel.
  if (!sizes.whole_k || sizes.same_sums) {
    for (const int tokens : {64, 128}) plans.add(model.middle(tokens));
    if (sizes.bits < 8) plans.add(model.middle(160));
    for (const int tokens : {192, 256}) plans.add(model.many(tokens));
  }
  return plans;
}

PackedPlan plan_fragments(const PackedSizes& sizes, const GpuFigures& gpu) {
  const PackedPlans plans = fragment_candidates(sizes, gpu);
  if (plans.size() == 0) return {};
  // For code to be fetched (docs/notes/cuda-layer.md, "Code that is fetched anew").
  constexpr double other_kernel_us = 8;
  const auto us = [&](const PackedPlan& plan) {
    const bool other = sizes.tile_before > 0 && plan.tile_tokens != sizes.tile_before;
    return plan.us + (other ? other_kernel_us : 0);
  };
  return *std::min_element(plans.begin(), plans.end(),
                           [&](const auto& a, const auto& b) { return us(a) < us(b); });
}

std::string fragment_words(const PackedPlan& plan) {
  if (plan.kernel == PackedPlan::none) return "no kernel";
  const bool many = plan.kernel == PackedPlan::many_rows;
  return fmt::format(
      "{}, weights decoded in registers, tiles of {} weights x {} rows{}, {} "
      "blocks, about {:.0f} us",
      many ? "wgmma" : "mma.sync", many && plan.tile_tokens <= most_middle_tokens ? 256 : 128,
      plan.tile_tokens, plan.split > 1 ? fmt::format(", k in {} parts", plan.split) : "",
      plan.blocks, plan.us);
}

}  // namespace shunt::cuda_engine
