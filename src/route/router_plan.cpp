#include "route/router_plan.hpp"

#include <algorithm>
#include <cstdlib>

namespace shunt::routing {

namespace {

constexpr int most_columns = 512;  // of a kernel that routes
constexpr int few_tokens = 16;
constexpr int few_warps = 8;
constexpr int meeting_tokens = 128;
constexpr int most_groups = 4;
constexpr int flat_tokens = 4;  // up to here parts meet in memory, and no cluster is waited for

// The largest power of two up to `most` (at least 1).
int power_of_two(int most) {
  int p = 1;
  while (2 * p <= most) p *= 2;
  return p;
}

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
  if (tokens <= flat_tokens) {
    p.parts = most;
  } else {
    p.parts = power_of_two(most);
    p.ranks = std::min(p.parts, gpu.largest_cluster);
  }
  return p;
}

// A tile of up to 64 columns and a cut of H to a block, so that all multiprocessors read W and x;
// what they sum up meets in memory. Pays where the bytes of a block that it saves take longer.
bool plan_meeting(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                  const RouterPlan& otherwise, RouterPlan& p) {
  if (tokens > meeting_tokens || columns > most_columns) return false;
  const auto tiles = static_cast<int>((tokens + 63) / 64);
  const int column_tiles = (columns + 63) / 64, steps = (hidden + 63) / 64;
  const int ranks = std::min(gpu.largest_cluster, power_of_two(steps));
  if (ranks < 8) return false;  // an owner's rows, whole, lie where its sums arrived
  const int room = gpu.multiprocessors / (tiles * column_tiles * ranks);
  const int groups = std::max(1, std::min({most_groups, room, steps / ranks}));
  const auto step_bytes = [](int rows, int width) { return (rows + width) * 64 * 2; };
  const int now =
      steps / otherwise.parts * step_bytes(otherwise.rows, std::min(otherwise.columns, 256));
  const int then = steps / (ranks * groups) * step_bytes(64, 64);
  if (now - then < 128 * 1024) return false;
  p = {RouterKernel::many, 64, 64, ranks * groups, ranks};
  p.meets = true;
  return true;
}

// Tiles of 128 tokens, or of 64 where those would leave half of the GPU idle, or H be cut into more
// parts than sums are quickly exchanged among; H over as many blocks of a cluster as there are
// multiprocessors left. Two tiles to a cluster, where they share enough of W.
RouterPlan plan_many(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden) {
  const int steps = (hidden + 63) / 64;
  RouterPlan p{RouterKernel::many};
  p.columns = columns > most_columns ? 256 : tile_of(columns);
  const int halves = p.columns == 512 ? 2 : 1;
  const std::int64_t across = columns > most_columns ? (columns + 255) / 256 : halves;
  std::int64_t tiles = 0;
  for (p.rows = 128;; p.rows = 64) {
    tiles = (tokens + p.rows - 1) / p.rows;
    const auto room = std::max<std::int64_t>(1, gpu.multiprocessors / (tiles * across));
    p.parts = power_of_two(std::min(static_cast<int>(room), std::min(8 / halves, steps)));
    if (p.rows == 64 || (2 * tiles * across * p.parts > gpu.multiprocessors && p.parts < 8)) break;
  }
  p.ranks = p.parts;
  if (tiles > 1 && 2 * p.parts * halves <= gpu.largest_cluster && steps / p.parts >= 4) p.pair = 2;
  if (const char* e = getenv("SHUNT_X_PAIR"))
    p.pair = atoi(e) > 1 && tiles > 1 && 2 * p.parts * halves <= 8 ? 2 : 1;
  RouterPlan meeting;
  if (plan_meeting(gpu, tokens, columns, hidden, p, meeting)) return meeting;
  return p;
}

// router.cu. Few tokens: 16 rows a cluster, H over as many blocks as a cluster may have. Many: 64
// rows, and H shared out only as far as multiprocessors are left over.
RouterPlan plan_any(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden) {
  const int steps = (hidden + 63) / 64;
  RouterPlan p;
  p.rows = tokens <= 64 || (tokens + 15) / 16 <= gpu.multiprocessors / 2 ? 16 : 64;
  p.columns = tile_of(columns);
  const std::int64_t tiles = (tokens + p.rows - 1) / p.rows;
  while (p.parts * 2 <= gpu.widest_cluster && p.parts * 2 <= p.rows && p.parts * 2 <= steps &&
         tiles * p.parts * 2 <= gpu.multiprocessors) {
    p.parts *= 2;
  }
  p.ranks = p.parts;
  return p;
}

}  // namespace

RouterPlan plan_router(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                       RouterOperands operands) {
  if (operands == RouterOperands::any) return plan_any(gpu, tokens, columns, hidden);
  // Clusters, and whole vectors of 8 along H.
  if (columns <= most_columns && gpu.compute >= 90 && gpu.largest_cluster > 1 && hidden % 8 == 0) {
    RouterPlan p;
    if (plan_rows(gpu, tokens, columns, hidden, p)) return p;
    if (tokens <= few_tokens) return plan_few(gpu, static_cast<int>(tokens), columns, hidden);
  }
  if (operands == RouterOperands::boxes && gpu.compute == 90 && gpu.largest_cluster == 8) {
    return plan_many(gpu, tokens, columns, hidden);
  }
  // Its code is for 10.0 alone, not for the 10.3 that follows.
  if (operands == RouterOperands::boxes && gpu.compute == 100 && columns <= most_columns) {
    return {.kernel = RouterKernel::blackwell, .rows = 128, .columns = tile_of(columns)};
  }
  return plan_any(gpu, tokens, columns, hidden);
}

std::size_t router_workspace_bytes(std::int64_t tokens, int columns) {
  if (tokens == 0) return 0;
  const std::size_t row = (static_cast<std::size_t>(columns) + 3) / 4 * 16;
  if (columns > most_columns) return static_cast<std::size_t>(tokens) * row;
  // few: parts / ranks rows a token, which is 16 up to 4 tokens and 2 after that. many: one a
  // group.
  const auto meeting =
      static_cast<unsigned>(most_groups * std::min<std::int64_t>(tokens, meeting_tokens));
  return row * std::size_t{std::max({16U * flat_tokens, 2U * few_tokens, meeting})};
}

}  // namespace shunt::routing
