#include "route/router_plan.hpp"

#include <algorithm>

namespace shunt::routing {

namespace {

constexpr int most_columns = 512;  // of a kernel that routes
constexpr int few_tokens = 16;
constexpr int few_warps = 8;
constexpr int meeting_tokens = 128;
constexpr int most_groups = 16;
constexpr int rank_choices[] = {1, 2, 3, 4, 8};  // of router_many.cu
// Up to here parts meet in memory, and no cluster is waited for; of so many columns further, where
// each token has a block that routes it.
constexpr int flat_tokens = 4, more_flat_tokens = 8, more_flat_columns = 256;

// The largest power of two up to `most` (at least 1).
int power_of_two(int most) {
  int p = 1;
  while (2 * p <= most) p *= 2;
  return p;
}

// Of a block's shared memory, for what router.cu has beside stages and sums: 7 KB.
constexpr int beside = 7 * 1024;

// The tile that holds so many columns.
int tile_of(int columns) {
  return columns <= 64 ? 64 : columns <= 128 ? 128 : columns <= 256 ? 256 : 512;
}

// Each block routes whole rows of its own: W is small enough to be read by every block.
bool plan_rows(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
               RouterPlan& p) {
  if (columns > 64) return false;
  const std::int64_t tiles = (tokens + 7) / 8;
  if (tiles > 4 * std::int64_t{gpu.multiprocessors}) return false;
  const int steps = (hidden + 31) / 32;
  const auto room = static_cast<int>(std::max<std::int64_t>(1, gpu.multiprocessors / tiles));
  // No part with less than two steps a warp: its barrier costs more than the loads it saves.
  const int parts = power_of_two(std::min({gpu.largest_cluster, room, steps / (2 * few_warps)}));
  if (std::int64_t{columns} * hidden / parts > 32768) return false;
  p = {RouterKernel::few, 8, columns <= 16 ? 16 : 64, parts, parts};
  return true;
}

// All multiprocessors read W; the blocks of a row of logits meet in memory.
RouterPlan plan_few(const cuda_engine::Gpu& gpu, int tokens, int columns, int hidden) {
  RouterPlan p{RouterKernel::few};
  p.rows = tokens <= 8 ? 8 : 16;
  p.columns = 16;
  const int tiles = (columns + p.columns - 1) / p.columns;
  const int steps = (hidden + 31) / 32;
  const int most = std::max(1, std::min({gpu.multiprocessors / tiles, steps / few_warps, 16}));
  if (tokens <= flat_tokens || (tokens <= more_flat_tokens && columns <= more_flat_columns)) {
    p.parts = most;
  } else {
    p.parts = power_of_two(most);
    p.ranks = std::min(p.parts, gpu.largest_cluster);
  }
  return p;
}

// router_many.cu's time as its parts add up, in us. Rates are those that 34 layouts of 6 routers
// showed on an NVIDIA H200 (docs/notes/cuda-route.md): of each of them it finds the fastest. Blocks
// that no room is left for run after the others.
double many_us(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
               const RouterPlan& p) {
  // Bytes or operations in a us, those of a block where it does not say L2.
  constexpr double l2_bytes = 12.5e6, copied_bytes = 1.15e5, first_bytes = 5e4, stored_bytes = 2e5,
                   remote_bytes = 2.8e4;
  const double products = p.rows == 128 ? 7.8e6 : 6.1e6;
  const int cluster = p.ranks * p.pair, groups = p.parts / p.ranks;
  const int at_once = gpu.clusters[static_cast<std::size_t>(cluster)];
  const std::int64_t tiles = (tokens + p.rows - 1) / p.rows;
  const std::int64_t clusters =
      (tiles + p.pair - 1) / p.pair * groups * ((columns + p.columns - 1) / p.columns);
  const std::int64_t whole_waves = (clusters + at_once - 1) / at_once;
  const std::int64_t blocks = std::min<std::int64_t>(clusters, at_once) * cluster;
  const int steps = ((hidden + 63) / 64 + p.parts - 1) / p.parts;
  const int share = (p.rows + p.ranks - 1) / p.ranks;  // rows that a rank routes
  const int columns_copied = p.columns / p.pair;
  const bool turned = p.rows < 64;  // and 16 lanes select a row, not 8
  const int passes = turned ? (share + 15) / 16 : (share + 31) / 32, few_passes = (share + 7) / 8;
  const double row = 128.0 * steps;  // bytes of a row of x or W that a block reads
  const double from_l2 = static_cast<double>(blocks) * row * (p.rows + columns_copied);
  double wave = 2.2 + 128.0 * (p.rows + p.columns) / first_bytes + (p.pair > 1 ? 0.4 : 0.0);
  wave += std::max({from_l2 / l2_bytes, row * (p.rows + p.columns) / copied_bytes,
                    row * p.rows * p.columns / products});
  wave += 4.0 * p.rows * p.columns / stored_bytes;
  if (p.ranks > 1) wave += 0.9 + 4.0 * share * (p.ranks - 1) * p.columns / remote_bytes;
  if (p.meets) {
    wave += 2 + 1.1 * few_passes;
  } else if (columns <= most_columns) {
    wave += passes * (1 + 0.0035 * p.columns) * (turned ? 0.85 : 1);
  }
  return 0.7 + static_cast<double>(whole_waves) * wave;
}

// Parts of H where they may not follow from T: between what few tokens would take and what many.
constexpr int fixed_parts = 4;

// Of all layouts the one that should end first; of equals the first. `fixed`: of those with
// fixed_parts.
RouterPlan plan_many(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                     bool fixed) {
  const int steps = (hidden + 63) / 64;
  RouterPlan best;
  double best_us = 0;
  const auto consider = [&](const RouterPlan& p) {
    const int cluster = p.ranks * p.pair;
    if (cluster > gpu.largest_cluster || gpu.clusters[static_cast<std::size_t>(cluster)] == 0 ||
        p.parts > steps) {
      return;
    }
    const double us = many_us(gpu, tokens, columns, hidden, p);
    if (best_us == 0 || us < best_us) best = p, best_us = us;
  };
  RouterPlan p{RouterKernel::many};
  p.columns = columns > most_columns ? 256 : tile_of(columns);
  const int least_rows = p.columns == 128 && !fixed ? 16 : 64;
  for (p.rows = p.columns == 512 ? 64 : 128; p.rows >= least_rows; p.rows /= 2) {
    for (const int ranks : rank_choices) {
      if (fixed && ranks != std::min(fixed_parts, power_of_two(steps))) continue;
      p.ranks = p.parts = ranks;
      for (p.pair = 1; p.pair <= (tokens > p.rows ? 2 : 1); ++p.pair) consider(p);
    }
  }
  // Tiles of 64 columns, so that all multiprocessors read W and x; a ticket a rank.
  const auto tiles = static_cast<int>(std::min<std::int64_t>((tokens + 63) / 64, 3));
  if (!fixed && columns > 64 && columns <= most_columns && tiles <= meeting_tokens / 64) {
    p = {RouterKernel::many, 64, 64};
    p.meets = true;
    for (const int ranks : rank_choices) {
      if (ranks * tiles > 16) break;
      p.ranks = ranks;
      for (int groups = 1; groups <= most_groups; ++groups) {
        p.parts = p.ranks * groups;
        consider(p);
      }
    }
  }
  return best;
}

// router.cu. Few tokens: 16 rows a cluster, H over as many blocks as a cluster may have. Many: 64
// rows, and H shared out only as far as multiprocessors are left over.
RouterPlan plan_any(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                    bool fixed) {
  const int steps = (hidden + 63) / 64;
  RouterPlan p;
  p.rows = tokens <= 64 || (tokens + 15) / 16 <= gpu.multiprocessors / 2 ? 16 : 64;
  p.columns = std::min(tile_of(columns), widest_any_tile(gpu));
  // As many as shared memory holds: what is on its way is what a multiprocessor can read a second.
  p.stages = std::min(8, (gpu.shared_bytes - beside) / any_stage_bytes(p.rows, p.columns));
  const std::int64_t tiles = (tokens + p.rows - 1) / p.rows;
  if (fixed) {
    p.parts = power_of_two(std::max(1, std::min({fixed_parts, gpu.widest_cluster, steps})));
    p.ranks = p.parts;
    return p;
  }
  const auto fits = [&](int parts) {
    return any_bytes(false, p.rows, p.columns, parts, p.stages) + 1024 <= gpu.shared_bytes;
  };
  while (p.parts * 2 <= gpu.widest_cluster && p.parts * 2 <= p.rows && p.parts * 2 <= steps &&
         tiles * p.parts * 2 <= gpu.multiprocessors && fits(p.parts * 2)) {
    p.parts *= 2;
  }
  p.ranks = p.parts;
  return p;
}

}  // namespace

int widest_any_tile(const cuda_engine::Gpu& gpu) {
  // Two stages at least, and the sums of 64 rows.
  const int needed = any_bytes(false, 64, most_columns, 1, 2) + beside;
  return gpu.shared_bytes >= needed ? most_columns : most_columns / 2;
}

RouterPlan plan_router(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                       RouterOperands operands, bool invariant) {
  if (operands == RouterOperands::any) return plan_any(gpu, tokens, columns, hidden, invariant);
  // Clusters, and whole vectors of 8 along H.
  if (!invariant && columns <= most_columns && gpu.compute >= 90 && gpu.largest_cluster > 1 &&
      hidden % 8 == 0) {
    RouterPlan p;
    if (plan_rows(gpu, tokens, columns, hidden, p)) return p;
    if (tokens <= few_tokens) return plan_few(gpu, static_cast<int>(tokens), columns, hidden);
  }
  if (operands == RouterOperands::boxes && gpu.compute == 90 && gpu.largest_cluster == 8) {
    return plan_many(gpu, tokens, columns, hidden, invariant);
  }
  // Its code is for 10.0 alone, not for the 10.3 that follows.
  if (operands == RouterOperands::boxes && gpu.compute == 100 && columns <= most_columns) {
    return {.kernel = RouterKernel::blackwell, .rows = 128, .columns = tile_of(columns)};
  }
  return plan_any(gpu, tokens, columns, hidden, invariant);
}

std::size_t router_workspace_bytes(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns) {
  if (tokens == 0) return 0;
  const std::size_t row = (static_cast<std::size_t>(columns) + 3) / 4 * 16;
  const std::size_t logits = static_cast<std::size_t>(tokens) * row;
  if (columns > most_columns) return logits;
  // few: parts / ranks rows a token, which is 16 up to 4 tokens and 2 after that. many: one a
  // group.
  const auto meeting =
      static_cast<unsigned>(most_groups * std::min<std::int64_t>(tokens, meeting_tokens));
  const std::size_t sums =
      row * std::size_t{std::max({16U * flat_tokens, 2U * few_tokens, meeting})};
  return columns > widest_any_tile(gpu) ? std::max(sums, logits) : sums;
}

}  // namespace shunt::routing
