// The order of tiles of fp8's kernel for many rows, on the host lane by lane: whatever sizes groups
// have, each row meets each column of tiles once.
// clang-format off
#include "cuda/warp_on_host.hpp"

inline thread_local struct { unsigned x = 0; } threadIdx;
inline struct { unsigned x = 0; } blockDim;
inline constexpr int warps_of_block = 3;

#include "gemm/tall_first.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <atomic>
#include <random>

namespace shunt::test {
namespace {

using cuda_engine::GroupTile;
constexpr int half = 128;
using Tiles = cuda_engine::TallFirst<half>;

// Of groups with these numbers of rows, in the order of the kernel's clusters.
std::vector<GroupTile> tiles_of(const std::vector<int>& sizes, int columns) {
  const int groups = static_cast<int>(sizes.size());
  std::vector<std::int32_t> offsets{0};
  for (const int size : sizes) offsets.push_back(offsets.back() + size);
  const GroupWalk walk{.offsets = offsets.data(), .rows = offsets.back()};
  std::vector<std::uint64_t> memory(static_cast<std::size_t>(Tiles::bytes(groups)) / 8 + 1);
  std::vector<GroupTile> found;
  std::atomic<bool> alike = true;
  blockDim.x = 32 * warps_of_block;
  HostWarp::run_block(warps_of_block, [&](int warp, int lane) {
    threadIdx.x = static_cast<unsigned>(32 * warp + lane);
    Tiles tiles(memory.data(), walk, groups, columns);
    tiles.build();
    if (warp > 0) return;
    for (int number = 0; number < tiles.tiles(); ++number) {
      const GroupTile tile = tiles.find(number);
      if (lane == 0) found.push_back(tile);
      __syncwarp();
      const GroupTile& first = found.back();
      if (tile.group != first.group || tile.row != first.row || tile.column != first.column) {
        alike = false;
      }
      __syncwarp();
    }
  });
  EXPECT_TRUE(alike) << "lanes differ";
  return found;
}

// A tile of more rows than a low one has is one column wide, others are two.
void expect_all_once(const std::vector<int>& sizes, int columns) {
  std::vector<int> begins{0};
  for (const int size : sizes) begins.push_back(begins.back() + size);
  const auto rows = static_cast<std::size_t>(begins.back());
  std::vector<int> met(rows * static_cast<std::size_t>(columns));
  for (const GroupTile& tile : tiles_of(sizes, columns)) {
    const bool tall = tile.count > half;
    ASSERT_GT(tile.count, 0);
    ASSERT_LE(tile.count, 2 * half);
    ASSERT_GE(tile.row, begins[static_cast<std::size_t>(tile.group)]);
    ASSERT_LE(tile.row + tile.count, begins[static_cast<std::size_t>(tile.group) + 1]);
    const int first = tall ? tile.column : 2 * tile.column;
    ASSERT_LT(first, columns);
    for (int row = tile.row; row < tile.row + tile.count; ++row) {
      for (int column = first; column < std::min(columns, first + (tall ? 1 : 2)); ++column) {
        ++met[static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) +
              static_cast<std::size_t>(column)];
      }
    }
  }
  for (const int times : met) ASSERT_EQ(times, 1);
}

TEST(TallFirst, EveryRowMeetsEveryColumnOnce) {
  std::mt19937 random(1);
  for (const int columns : {1, 2, 3, 8, 9}) {
    expect_all_once({1, 64, 65, 128, 129, 192, 193, 256, 257, 448, 449}, columns);
    expect_all_once({0, 2048, 0, 2049, 5000, 0}, columns);  // bands
    for (const int most : {5, 150, 300, 1200}) {
      std::vector<int> sizes(most > 200 ? 9 : 40);
      for (int& size : sizes) size = static_cast<int>(random() % static_cast<unsigned>(most + 1));
      expect_all_once(sizes, columns);
    }
  }
}

// As many groups as it finds, more than a block has threads.
TEST(TallFirst, ManyGroups) {
  std::mt19937 random(2);
  std::vector<int> sizes(1024);
  for (int& size : sizes) size = random() % 3 == 0 ? static_cast<int>(random() % 230) : 0;
  expect_all_once(sizes, 3);
  expect_all_once(std::vector<int>(300), 2);
}

// Groups with tall tiles stand before those without.
TEST(TallFirst, TallTilesComeFirst) {
  const std::vector<int> sizes{20, 300, 130, 70, 60, 520, 190, 128};
  std::vector<int> kinds;
  for (const GroupTile& tile : tiles_of(sizes, 4)) {
    kinds.push_back(sizes[static_cast<std::size_t>(tile.group)] > half ? 0 : 1);
  }
  EXPECT_TRUE(std::is_sorted(kinds.begin(), kinds.end()));
}

}  // namespace
}  // namespace shunt::test
