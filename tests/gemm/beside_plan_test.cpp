// Plans of a product that runs while others wait for multiprocessors.
#include "gemm/beside_plan.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "gemm/h200.hpp"

namespace shunt::cuda_engine {
namespace {

ProductSizes sizes(std::int64_t rows, std::int64_t n, std::int64_t k) {
  return {.dtype = DType::bf16, .groups = 1, .rows = rows, .group_rows = n, .k = k};
}
PackedSizes fp8(std::int64_t rows, std::int64_t n, std::int64_t k) {
  return {.groups = 1,
          .rows = rows,
          .group_rows = n,
          .k = k,
          .packed_rows = true,
          .rows_in_place = true};
}

// Every tile was forced and layers were timed: docs/notes/cuda-layer.md, "Tiles of a shared
// expert".
TEST(BesidePlan, TakesTilesThatLeaveMultiprocessors) {
  const ProductSizes scout = sizes(64, 2048, 5120);  // gate_up of Llama 4 Scout's on one of 8
  const ProductPlan fastest = plan_product(scout, h200), beside = plan_beside(scout, h200);
  EXPECT_EQ(fastest.kernel, ProductPlan::few_rows);
  EXPECT_GT(fastest.blocks, 100) << describe(fastest);
  EXPECT_EQ(beside.tile_tokens, 64) << describe(beside);
  EXPECT_EQ(beside.split, 4) << describe(beside);
  EXPECT_EQ(beside.blocks, 64) << describe(beside);
  const ProductPlan deepseek = plan_beside(sizes(64, 4096, 7168), h200);
  EXPECT_EQ(deepseek.tile_tokens, 64) << describe(deepseek);
  EXPECT_EQ(deepseek.split, 2) << describe(deepseek);
}

TEST(BesidePlan, HasNoMoreBlocksThanTilesAndKeepsKernels) {
  for (const std::int64_t rows : {1, 3, 8, 9, 16, 33, 64, 100, 128, 256, 512, 4096}) {
    for (const auto& [n, k] : {std::pair{2048, 5120}, {5120, 1024}, {1024, 2048}, {2880, 2880}}) {
      SCOPED_TRACE(std::to_string(rows) + " rows by " + std::to_string(n) + " x " +
                   std::to_string(k));
      const auto check = [&](const auto& plan, const auto& fastest) {
        EXPECT_EQ(plan.kernel, fastest.kernel);
        EXPECT_GT(plan.blocks, 0);
        constexpr bool in_fp8 = std::is_same_v<std::decay_t<decltype(plan)>, PackedPlan>;
        EXPECT_EQ(plan.blocks % plan.split, 0);
        EXPECT_LE(plan.blocks, h200.multiprocessors * 2);
        if (plan.kernel != plan.few_rows || (in_fp8 && rows <= 8)) {
          EXPECT_EQ(plan.tile_tokens, fastest.tile_tokens);
          EXPECT_EQ(plan.blocks, fastest.blocks);
          return;
        }
        const std::int64_t tiles =
            (n + 127) / 128 * ((rows + plan.tile_tokens - 1) / plan.tile_tokens);
        EXPECT_LE(plan.blocks, plan.split * tiles);
      };
      check(plan_beside(sizes(rows, n, k), h200), plan_product(sizes(rows, n, k), h200));
      check(plan_beside(fp8(rows, n, k), h200), plan_packed(fp8(rows, n, k), h200));
    }
  }
}

TEST(BesidePlan, LeavesEightRowsOfFp8AsTheyAre) {
  const PackedSizes eight = fp8(8, 4096, 7168), more = fp8(64, 4096, 7168);
  EXPECT_EQ(plan_beside(eight, h200).split, plan_packed(eight, h200).split);
  EXPECT_EQ(plan_beside(eight, h200).blocks, plan_packed(eight, h200).blocks);
  EXPECT_LT(plan_beside(more, h200).blocks, plan_packed(more, h200).blocks);
}

PackedSizes nvfp4(std::int64_t rows, std::int64_t n, std::int64_t k) {
  return {.groups = 1, .rows = rows, .group_rows = n, .k = k, .bits = 4.5};
}

// Likewise: layers took less time with these tiles than with those that end first.
TEST(BesidePlan, DecodedWeightsTakeFewerMultiprocessors) {
  struct Case {
    std::int64_t rows, n, k;
    int tile, split;
  };
  for (const Case& of : {Case{32, 2048, 5120, 24, 4},
                         {64, 2048, 5120, 24, 4},
                         {256, 2048, 5120, 64, 1},
                         {128, 4096, 7168, 64, 1}}) {
    SCOPED_TRACE(std::to_string(of.rows) + " rows");
    const PackedSizes sizes = nvfp4(of.rows, of.n, of.k);
    const PackedPlan plan = plan_fragments_beside(sizes, h200);
    EXPECT_EQ(plan.tile_tokens, of.tile) << fragment_words(plan);
    EXPECT_EQ(plan.split, of.split) << fragment_words(plan);
    EXPECT_GT(plan.us, plan_fragments(sizes, h200).us);
  }
}

TEST(BesidePlan, DecodedWeightsOnOtherGpusKeepTheFastest) {
  const GpuFigures a100{.compute = 80,
                        .multiprocessors = 108,
                        .shared_bytes = 166912,
                        .read_gbps = 1555,
                        .clock_ghz = 1.41};
  for (const std::int64_t rows : {8, 16, 64, 256}) {
    const PackedSizes sizes = nvfp4(rows, 2048, 5120);
    const PackedPlan plan = plan_fragments_beside(sizes, a100);
    EXPECT_EQ(plan.kernel, PackedPlan::portable);
    EXPECT_EQ(plan.tile_tokens, plan_fragments(sizes, a100).tile_tokens);
  }
}

// A second kernel's code takes longer than tiles that are a little better are worth.
TEST(BesidePlan, DecodedWeightsOfTheSecondProductKeepTheFirstOnesTile) {
  PackedSizes down = nvfp4(32, 2048, 512);  // Qwen3-Next's
  EXPECT_EQ(plan_fragments_beside(down, h200).tile_tokens, 24);
  down.tile_before = plan_fragments_beside(nvfp4(32, 1024, 2048), h200).tile_tokens;
  EXPECT_EQ(down.tile_before, 8);
  EXPECT_EQ(plan_fragments_beside(down, h200).tile_tokens, 8);
}

TEST(BesidePlan, DecodedWeightsHaveNoClustersButForFewRows) {
  for (const std::int64_t rows : {1, 8, 9, 16, 33, 64, 100, 128, 256, 512, 4096}) {
    for (const auto& [n, k] : {std::pair{2048, 5120}, {5120, 1024}, {1024, 2048}, {2880, 2880}}) {
      const PackedSizes sizes = nvfp4(rows, n, k);
      const PackedPlan plan = plan_fragments_beside(sizes, h200),
                       fastest = plan_fragments(sizes, h200);
      SCOPED_TRACE(std::to_string(rows) + " rows: " + fragment_words(plan));
      EXPECT_NE(plan.kernel, PackedPlan::none);
      if (rows < 16 || rows > 256) {
        EXPECT_EQ(plan.split, fastest.split);
        EXPECT_EQ(plan.tile_tokens, fastest.tile_tokens);
      } else {
        EXPECT_LE(plan.split, 4);
      }
    }
  }
}

// k is not shared out where a row's bits may not depend on how many there are.
TEST(BesidePlan, KeepsKWhole) {
  ProductSizes whole = sizes(64, 2048, 5120);
  whole.whole_k = true;
  EXPECT_EQ(plan_beside(whole, h200).split, 1);
  PackedSizes packed = fp8(64, 2048, 5120);
  packed.whole_k = true;
  EXPECT_EQ(plan_beside(packed, h200).split, 1);
  PackedSizes decoded = nvfp4(64, 2048, 5120);
  decoded.whole_k = true;
  EXPECT_EQ(plan_fragments_beside(decoded, h200).split, 1);
}

}  // namespace
}  // namespace shunt::cuda_engine
