// How the kernel of few pairs is cut over a GPU: all of its warps are there at once, or, of first
// products in 16 bits, follow each other; else another kernel is faster.
#include "gemm/pair_stream.hpp"

#include <algorithm>
#include <cmath>

namespace shunt::cuda_engine {

namespace {

constexpr int few_warps = 16, more_warps = 24;  // of a multiprocessor

// Of so many groups, with `sets` tiles each.
double blocks_of(const PairSizes& sizes, double groups, int sets) {
  const int of_group = (sizes.tiles + sets - 1) / sets;
  return std::ceil(groups * of_group);
}
// Whether a grid has enough blocks to be taken where not all of k is shared out.
bool fills(double blocks, int multiprocessors) {
  constexpr double least = 0.75;  // of the multiprocessors
  return blocks >= least * multiprocessors;
}

// One token's, by few warps (PairLimits::of_one).
PairPlan plan_one_token(const PairSizes& sizes, const PairLimits& limits, int multiprocessors,
                        std::int64_t shared_bytes) {
  constexpr int most_warps = 8;              // of a block
  const int longest = sizes.waits ? 16 : 8;  // steps of a warp
  constexpr int least_of_parts = 8;          // and of one that has not all
  const double tiles = sizes.groups_hit * sizes.tiles;
  PairPlan plan{.warps = limits.of_one};
  for (int parts = 1; parts <= std::min(limits.most_parts, sizes.steps); parts *= 2) {
    if (tiles * parts <= limits.of_one * multiprocessors) plan.parts = parts;
  }
  if (plan.parts == 0 || sizes.steps > longest * plan.parts) return {};
  if (plan.parts > 1 && sizes.steps < least_of_parts * plan.parts) return {};
  const auto blocks = [&](int sets) { return blocks_of(sizes, sizes.groups_hit, sets); };
  const auto room = [&](int sets, int warp_bytes) {
    const int bytes = sizes.row_bytes + plan.parts * sets * warp_bytes + own_shared_bytes;
    return (shared_bytes + own_shared_bytes) / bytes * multiprocessors;
  };
  if (!sizes.waits) {
    plan.sets = std::max(1, limits.block_warps / plan.parts);
    const auto at_once = static_cast<double>(room(plan.sets, sizes.warp_bytes));
    return blocks(plan.sets) <= at_once ? plan : PairPlan{};
  }
  for (; plan.parts * plan.sets <= most_warps; ++plan.sets) {  // one block a multiprocessor
    if (blocks(plan.sets) > multiprocessors) continue;
    return room(plan.sets, sizes.one_warp_bytes) > 0 ? plan : PairPlan{};
  }
  return {};
}

// All warps of a grid on the GPU at once.
PairPlan plan_at_once(const PairSizes& sizes, const PairLimits& limits, int multiprocessors,
                      std::int64_t shared_bytes) {
  const int steps = sizes.steps;
  // As many parts as so many warps of a multiprocessor have room for.
  const auto fit = [&](int warps) {
    PairPlan plan;
    const int warp_bytes = warps == few_warps ? sizes.warp_bytes : sizes.more_warp_bytes;
    for (int parts = limits.least; parts <= std::min(limits.most_parts, steps); parts *= 2) {
      const int sets = std::max(1, limits.block_warps / parts), of_block = parts * sets;
      const int bytes = sizes.row_bytes + of_block * warp_bytes + own_shared_bytes;
      const std::int64_t room = (shared_bytes + own_shared_bytes) / bytes;
      const double at_once =
          static_cast<double>(std::min<std::int64_t>(warps / of_block, room)) * multiprocessors;
      if (blocks_of(sizes, sizes.groups_hit, sets) <= at_once) plan = {parts, sets, warps};
    }
    return plan;
  };
  const int longest_of_few = sizes.waits || sizes.tokens == 1 ? 16 : limits.longest_of_early;
  const PairPlan few = fit(few_warps);
  if (few.parts > 0 && steps <= std::min(limits.longest, longest_of_few) * few.parts) return few;
  const PairPlan more = limits.most > few_warps ? fit(more_warps) : PairPlan{};
  if (more.parts > few.parts && steps <= limits.longest_of_more * more.parts) return more;
  if (few.parts == 0 || steps <= longest_of_few * few.parts) return few;
  // Longer ones pay where a product waits for ids, if its blocks are shared out evenly: the most
  // that a multiprocessor has is what counts (measured: docs/notes/cuda-layer.md).
  constexpr int longest_of_first = 32;
  constexpr double even_for_one = 0.75, even_for_more = 0.95;
  const double of_each = blocks_of(sizes, sizes.most_hit, few.sets) / multiprocessors;
  const bool even =
      of_each >= (sizes.tokens == 1 ? even_for_one : even_for_more) * std::ceil(of_each);
  const bool pays = sizes.waits && even && steps <= longest_of_first * few.parts;
  return pays ? few : PairPlan{};
}

// A first product of some tokens, whose blocks follow each other (PairLimits::in_rounds).
PairPlan plan_in_rounds(const PairSizes& sizes, int multiprocessors) {
  constexpr PairPlan plan{.parts = 2, .sets = 4, .warps = more_warps};
  const bool pays = sizes.waits && sizes.tokens > 1 && sizes.steps >= plan.parts &&
                    fills(blocks_of(sizes, sizes.groups_hit, plan.sets), multiprocessors);
  return pays ? plan : PairPlan{};
}

}  // namespace

PairPlan plan_pairs(const PairSizes& sizes, const PairLimits& limits, int multiprocessors,
                    std::int64_t shared_bytes) {
  PairPlan plan;
  if (sizes.tokens == 1 && limits.of_one > 0 && !sizes.beside) {
    plan = plan_one_token(sizes, limits, multiprocessors, shared_bytes);
  }
  if (plan.parts == 0) plan = plan_at_once(sizes, limits, multiprocessors, shared_bytes);
  if (limits.fills && !fills(blocks_of(sizes, sizes.groups_hit, plan.sets), multiprocessors)) {
    return {};
  }
  if (plan.parts == 0 && limits.in_rounds) plan = plan_in_rounds(sizes, multiprocessors);
  return plan;
}

int share_bytes(std::int64_t blocks, int multiprocessors, std::int64_t shared_bytes) {
  const std::int64_t share = (blocks + multiprocessors - 1) / multiprocessors;
  if (share < 2) return 0;
  const std::int64_t room = shared_bytes + own_shared_bytes;
  const std::int64_t least = room / (share + 1) + 1 - own_shared_bytes;  // one more does not fit
  return static_cast<int>((std::max<std::int64_t>(least, 0) + 127) / 128 * 128);
}

bool shares_blocks(const Gpu& gpu, const PairArgs& args) {
  return gpu.dependent_launch && (!args.beside || args.tokens > 2);
}

int next_left(const Gpu& gpu, const PairArgs& args, const PairPlan& plan, const PairLimits& limits,
              int depth) {
  constexpr int left = 8;
  if (!gpu.dependent_launch || args.early) return -1;
  if (plan.warps == limits.of_one) return limits.left_of_one;
  return plan.warps <= limits.most_late && args.each >= 2 * depth ? left : -1;
}

bool in_one_pass(std::int64_t rows, std::int64_t steps, double groups_hit, int multiprocessors) {
  constexpr int warps = 16, most_parts = 8, longest = 16;
  const std::int64_t of_group = (rows + 15) / 16;
  const double tiles = groups_hit * static_cast<double>(of_group);
  int parts = most_parts;
  while (parts > 0 && tiles * parts > warps * multiprocessors) parts /= 2;
  return parts > 0 && steps <= std::int64_t{longest} * parts;
}

double one_pass_us(double bytes, const GpuFigures& gpu) {
  // Start, ids, the wait for rows and the end: of a layer of one token (docs/notes/cuda-layer.md).
  constexpr double launch_us = 2.6, memory_share = 0.95;  // of what memory's clock says
  return launch_us + bytes / (gpu.read_gbps * memory_share * 1e3);
}

double groups_hit(int groups, int pairs, int tokens) {
  const double of_token = static_cast<double>(pairs) / tokens;
  const double missed = std::pow(std::max(0.0, 1 - of_token / groups), tokens);
  return std::max(1.0, std::min<double>(pairs, groups * (1 - missed)));
}

}  // namespace shunt::cuda_engine
