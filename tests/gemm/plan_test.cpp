// Which kernel a product takes on a GPU, and how: for figures of an H200, without one.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "gemm/cuda_layout.hpp"
#include "gemm/h200.hpp"
#include "gemm/product_plan.hpp"
#include "gemm/weighed.hpp"

namespace shunt::cuda_engine {
namespace {

ProductSizes sizes(int groups, std::int64_t rows, std::int64_t n, std::int64_t k,
                   bool gathered = false) {
  return {.dtype = DType::bf16,
          .groups = groups,
          .rows = rows,
          .group_rows = n,
          .k = k,
          .gathered = gathered};
}

TEST(ProductPlan, ManyRowsAreMultipliedInLargeTiles) {
  for (const auto& s : {sizes(16, 16384, 2048, 5120), sizes(16, 16384, 5120, 1024),
                        sizes(128, 16384, 2048, 5120), sizes(8, 4096, 28672, 4096)}) {
    const ProductPlan plan = plan_product(s, h200);
    EXPECT_EQ(plan.kernel, ProductPlan::many_rows) << describe(plan);
    EXPECT_EQ(plan.blocks, 132);
    EXPECT_GE(plan.tile_tokens * plan.tile_rows, 128 * 192);
  }
}

// Another kernel than few_rows after it costs some 5 us (docs/notes/cuda-layer.md, "Code that is
// fetched anew").
TEST(ProductPlan, TheSecondProductTakesTheTilesOfTheFirst) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  const auto after = [&](ProductSizes s, int tile) {
    s.few_before = tile;
    return plan_product(s, h100);
  };
  const auto us_in_tiles_of = [&](const ProductSizes& s, int tile) {
    double least = INFINITY;
    for (const ProductPlan& plan : candidates(s, h100)) {
      if (plan.kernel == ProductPlan::few_rows && plan.tile_tokens == tile) {
        least = std::min(least, plan.us);
      }
    }
    return least;
  };
  // down of Qwen3-30B-A3B with 256 tokens, of Granite 3.0 3B with 128: timed, 421 to 412 us and 80
  // to 75 for the layer.
  for (const auto& [s, tile] :
       {std::pair{sizes(128, 2048, 2048, 768), 32}, {sizes(40, 1024, 1536, 512), 64}}) {
    const ProductPlan plan = after(s, tile);
    EXPECT_EQ(plan.kernel, ProductPlan::few_rows);
    EXPECT_EQ(plan.tile_tokens, tile);
    EXPECT_EQ(plan.us, us_in_tiles_of(s, tile));  // the kernel's own time
  }
  int others = 0, changed = 0;
  for (const std::int64_t tokens : {16, 64, 192, 256, 384, 1024, 4096}) {
    for (const auto& s : {sizes(128, 8 * tokens, 2048, 768), sizes(32, 4 * tokens, 2880, 2880),
                          sizes(8, 2 * tokens, 4096, 14336)}) {
      const ProductPlan alone = plan_product(s, h100);
      for (const int tile : {8, 16, 32, 64}) {
        const ProductPlan plan = after(s, tile);
        const bool dearer = us_in_tiles_of(s, tile) - alone.us > 5;
        EXPECT_EQ(plan.us, dearer ? alone.us : us_in_tiles_of(s, tile))
            << tokens << " tokens, k " << s.k << ", tiles of " << tile;
        others += dearer;
        changed += !dearer && plan.us != alone.us;
      }
    }
  }
  EXPECT_GT(others, 0);
  EXPECT_GT(changed, 0);
}

// What was faster on an H200 (docs/notes/cuda-gemm.md, "Rows gathered on the way").
TEST(ProductPlan, ManyRowsAreGatheredByAPass) {
  for (const auto& s :
       {sizes(128, 16384, 1536, 2048), sizes(128, 65536, 1536, 2048), sizes(32, 4096, 4096, 7168),
        sizes(32, 4096, 5760, 2880), sizes(8, 256, 28672, 4096), sizes(8, 4096, 28672, 4096)}) {
    EXPECT_TRUE(gather_first(s, h200)) << s.rows << " rows, k " << s.k;
  }
  for (const auto& s :
       {sizes(128, 512, 1536, 2048), sizes(128, 2048, 1536, 2048), sizes(128, 4096, 1536, 2048),
        sizes(128, 8192, 1536, 2048), sizes(128, 12288, 1536, 2048), sizes(128, 8192, 3072, 5120),
        sizes(32, 512, 4096, 7168)}) {
    EXPECT_FALSE(gather_first(s, h200)) << s.rows << " rows, k " << s.k;
  }
  GpuFigures b200 = h200;  // whose own kernel reads rows in order only
  b200.compute = 100;
  b200.multiprocessors = 148;
  EXPECT_TRUE(gather_first(sizes(16, 16384, 2048, 5120), b200));
}

// A kernel that writes rows to the layer's outputs saves a pass over them.
TEST(ProductPlan, ResultsThatWouldBeOutputsCountAPass) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  int changed = 0;
  for (const std::int64_t tokens : {1, 32, 256, 512, 640, 768, 4096}) {
    ProductSizes s = sizes(32, tokens, 7168, 2048);
    const ProductPlan alone = plan_product(s, h100);
    s.placed = true;
    const ProductPlan plan = plan_product(s, h100);
    const double pass = 2 + 4.0 * static_cast<double>(s.rows * s.group_rows) / (3352 * 1e3);
    EXPECT_LE(plan.us, alone.us + pass) << tokens;
    EXPECT_GE(plan.us, alone.us) << tokens;
    if (plan.kernel == alone.kernel) continue;
    EXPECT_EQ(plan.kernel, ProductPlan::many_rows) << tokens;
    ++changed;
  }
  EXPECT_GT(changed, 0);
}

// What was faster on an H200 (docs/notes/cuda-gemm.md, "A tile's rows in one copy").
TEST(ProductPlan, TilesInTurnTakeGroupsOf128RowsAndMore) {
  for (const auto& s :
       {sizes(128, 16384, 1536, 2048), sizes(128, 32768, 1536, 2048), sizes(128, 65536, 1536, 2048),
        sizes(8, 2048, 28672, 4096), sizes(8, 4096, 28672, 4096), sizes(8, 2048, 4096, 14336),
        sizes(32, 8192, 5760, 2880), sizes(32, 16384, 2880, 2880), sizes(32, 8192, 4096, 7168),
        sizes(16, 4096, 2048, 5120), sizes(16, 16384, 5120, 1024)}) {
    EXPECT_EQ(plan_product(s, h200).tile_tokens, 192) << s.rows << " rows, k " << s.k;
  }
  for (const auto& s : {sizes(32, 2048, 4096, 7168), sizes(128, 8192, 2048, 768)}) {
    EXPECT_EQ(plan_product(s, h200).tile_tokens, 128) << s.rows << " rows, k " << s.k;
  }
}

TEST(ProductPlan, FewRowsAreStreamedInTilesThatHoldThem) {
  EXPECT_EQ(plan_product(sizes(128, 128, 2048, 5120), h200).tile_tokens, 8);
  for (const auto& s : {sizes(128, 128, 2048, 5120), sizes(16, 128, 2048, 5120),
                        sizes(128, 8, 1536, 2048, true), sizes(1, 1, 4096, 7168)}) {
    const ProductPlan plan = plan_product(s, h200);
    EXPECT_EQ(plan.kernel, ProductPlan::few_rows) << describe(plan);
    EXPECT_LE(plan.tile_tokens, 16);
  }
}

// Groups of 6 rows in the mean, some of which have more than 8, and so on: what was faster on an
// H100 (docs/notes/cuda-gemm.md, "Tiles that nearly every group fits").
TEST(ProductPlan, TilesHoldNearlyEveryGroup) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  for (const GpuFigures& gpu : {h100, h200}) {
    for (const auto& [tokens, tile] : {std::pair{48, 16}, {96, 32}, {128, 32}}) {
      const ProductSizes s = sizes(32, std::int64_t{4} * tokens, 5760, 2880, true);
      EXPECT_EQ(plan_product(s, gpu).tile_tokens, tile) << tokens;
    }
    for (const auto& [tokens, tile] : {std::pair{16, 8}, {64, 16}, {96, 16}, {192, 32}}) {
      const ProductSizes s = sizes(128, std::int64_t{8} * tokens, 1536, 2048, true);
      EXPECT_EQ(plan_product(s, gpu).tile_tokens, tile) << tokens;
    }
  }
  EXPECT_EQ(plan_product(sizes(32, 768, 5760, 2880, true), h100).tile_tokens, 64);
  // Where routing is not uniform more groups have more ("Routing that is not uniform").
  EXPECT_EQ(plan_product(sizes(32, 256, 5760, 2880, true), h100).tile_tokens, 32);
  EXPECT_EQ(plan_product(sizes(128, 1024, 1536, 2048, true), h100).tile_tokens, 32);
}

// What was faster on an H100 (docs/notes/cuda-gemm.md, "Weights that several tiles read").
TEST(ProductPlan, TilesOfFewAndOfManyRows) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  // Granite 3.0 1B with 192 tokens, 3B with 256, Qwen3-30B-A3B with 384 and 512.
  for (const auto& s : {sizes(32, 1536, 1024, 1024, true), sizes(32, 1536, 1024, 512),
                        sizes(40, 2048, 1024, 1536, true), sizes(40, 2048, 1536, 512),
                        sizes(128, 3072, 1536, 2048, true), sizes(128, 4096, 1536, 2048, true)}) {
    const ProductPlan plan = plan_product(s, h100);
    EXPECT_EQ(plan.kernel, ProductPlan::few_rows) << s.rows << " rows, k " << s.k;
    EXPECT_EQ(plan.tile_tokens, 64) << s.rows << " rows, k " << s.k;
  }
  // Mixtral 8x7B with 384 tokens, gpt-oss-20b with 768: 96 rows a group, where routing differs
  // more.
  for (const auto& s : {sizes(8, 768, 28672, 4096), sizes(8, 768, 4096, 14336),
                        sizes(32, 3072, 5760, 2880), sizes(32, 3072, 2880, 2880)}) {
    EXPECT_EQ(plan_product(s, h100).tile_tokens, 192) << s.rows << " rows, k " << s.k;
  }
}

// Room for 1024 rows a group, of which 8 are likely.
TEST(ProductPlan, RowsThatAreExpectedDecide) {
  ProductSizes s = sizes(16, 16384, 2048, 5120);
  s.expected = 128;
  const ProductPlan plan = plan_product(s, h200),
                    few = plan_product(sizes(16, 128, 2048, 5120), h200);
  EXPECT_EQ(plan.kernel, ProductPlan::few_rows) << describe(plan);
  EXPECT_EQ(plan.tile_tokens, few.tile_tokens);
  EXPECT_EQ(plan.split, few.split);
  EXPECT_EQ(plan.us, few.us);
  EXPECT_GE(plan.blocks, few.blocks);  // there may be more rows than that
}

// One row of one expert: 32 tiles would leave a hundred multiprocessors idle.
TEST(ProductPlan, TooFewTilesAreSplitAlongK) {
  const ProductPlan plan = plan_product(sizes(32, 1, 4096, 7168), h200);
  EXPECT_GE(plan.split, 2) << describe(plan);
  EXPECT_EQ(plan.blocks % plan.split, 0);
  EXPECT_GE(plan.blocks, 64);
  EXPECT_EQ(plan_product(sizes(128, 128, 2048, 5120), h200).split, 1);
}

// Every plan of every size can be launched: whole clusters, a split that k has steps for.
TEST(ProductPlan, KStaysWholeWhereItMust) {
  ProductSizes s = sizes(1, 1, 4096, 7168);
  ASSERT_GT(plan_product(s, h200).split, 1);
  s.whole_k = true;
  for (const ProductPlan& plan : candidates(s, h200)) EXPECT_EQ(plan.split, 1) << describe(plan);
}

TEST(ProductPlan, ABlackwellTakesItsOwnKernelForRowsThatLieInGroups) {
  GpuFigures b200 = h200;
  b200.compute = 100;
  b200.multiprocessors = 148;
  const ProductPlan plan = plan_product(sizes(16, 16384, 2048, 5120), b200);
  EXPECT_EQ(plan.kernel, ProductPlan::blackwell);
  EXPECT_EQ(plan.blocks, 148);
  EXPECT_EQ(plan_product(sizes(16, 16384, 2048, 5120, true), b200).kernel, ProductPlan::portable);
  for (const ProductPlan& other : candidates(sizes(16, 16384, 2048, 5120), h200)) {
    EXPECT_NE(other.kernel, ProductPlan::blackwell);
  }
}

TEST(ProductPlan, EveryCandidateIsLegal) {
  for (const int groups : {1, 7, 128, 1024}) {
    for (const std::int64_t rows : {1, 5, 64, 1000, 65536}) {
      for (const std::int64_t n : {1, 72, 1408, 5760}) {
        for (const std::int64_t k : {1, 64, 100, 2880}) {
          const ProductSizes s = sizes(groups, rows, n, k);
          const auto plans = candidates(s, h200);
          ASSERT_GT(plans.size(), 1U);
          for (const ProductPlan& plan : plans) {
            EXPECT_GT(plan.us, 0);
            if (plan.kernel == ProductPlan::portable) continue;
            const int cluster = plan.kernel == ProductPlan::many_rows ? 2 : plan.split;
            EXPECT_GT(plan.blocks, 0);
            EXPECT_LE(plan.blocks, 132);
            EXPECT_EQ(plan.blocks % cluster, 0);
            EXPECT_LE(plan.split, (k + 63) / 64);
          }
        }
      }
    }
  }
}

// A layer's explain() prints these words: every candidate with its predicted time.
TEST(ProductPlan, EveryCandidateIsPrintedWithItsTime) {
  const ProductPlans plans = candidates(sizes(128, 8, 1536, 2048), h200);
  ASSERT_GT(plans.size(), 10U);
  const std::string words = weighed(plans);
  EXPECT_EQ(static_cast<std::size_t>(std::count(words.begin(), words.end(), ',')), plans.size());
  for (const ProductPlan& plan : plans) {
    const std::string k = plan.split > 1 ? fmt::format(" with k / {}", plan.split) : "";
    EXPECT_NE(words.find(fmt::format(" {}{} {:.1f}", plan.tile_tokens, k, plan.us)),
              std::string::npos)
        << words;
  }
  ProductSizes plain = sizes(4, 100, 64, 64);
  plain.dtype = DType::f32;
  EXPECT_EQ(weighed(candidates(plain, h200)), "");
}

TEST(ProductPlan, WhatHoppersKernelsDoNotTakeIsThePortableOnes) {
  const auto kernel = [](const ProductSizes& s, const GpuFigures& gpu = h200) {
    return plan_product(s, gpu).kernel;
  };
  ProductSizes s = sizes(4, 100, 64, 64);
  EXPECT_NE(kernel(s), ProductPlan::portable);
  s.dtype = DType::f32;
  EXPECT_EQ(kernel(s), ProductPlan::portable);
  s = sizes(4, 100, 64, 64);
  s.in_place = false;
  EXPECT_EQ(kernel(s), ProductPlan::portable);
  EXPECT_EQ(kernel(sizes(1025, 100, 64, 64)), ProductPlan::portable);
  EXPECT_EQ(kernel(sizes(4, 100, 64, 0)), ProductPlan::portable);
  EXPECT_EQ(kernel(sizes(1024, 1 << 20, 1 << 22, 64)), ProductPlan::portable);
  for (const int compute : {80, 89, 120}) {
    GpuFigures other = h200;
    other.compute = compute;
    EXPECT_EQ(kernel(sizes(4, 100, 64, 64), other), ProductPlan::portable);
  }
}

// What was faster on an H100 that was told to do without its own kernels (docs/notes/cuda-layer.md,
// "The portable grouped GEMM on Hopper").
TEST(ProductPlan, PortableTilesAreAsTallAsGroups) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  h100.compute = 0;
  const auto tile = [&](const ProductSizes& s) { return plan_product(s, h100).tile_tokens; };
  for (const std::int64_t tokens : {1, 4, 16, 64, 128, 256}) {
    EXPECT_EQ(tile(sizes(128, 8 * tokens, 1536, 2048)), 16) << tokens;
    EXPECT_EQ(tile(sizes(128, 8 * tokens, 2048, 768)), 16) << tokens;
  }
  EXPECT_EQ(tile(sizes(128, 4096, 1536, 2048)), 64);
  EXPECT_EQ(tile(sizes(128, 6144, 2048, 768)), 64);
  for (const auto& s : {sizes(16, 16384, 2048, 5120), sizes(16, 16384, 5120, 1024),
                        sizes(128, 16384, 2048, 5120), sizes(128, 16384, 5120, 1024),
                        sizes(128, 8192, 1536, 2048), sizes(128, 65536, 2048, 768)}) {
    EXPECT_EQ(tile(s), 128) << s.rows << " rows, k " << s.k;
  }
}

TEST(ProductPlan, PortableTilesFitOlderGpus) {
  struct Older {
    int compute, multiprocessors, shared_bytes;
    std::size_t tiles;
  };
  // A100, L40; what a Turing has, for which nothing is compiled; and a GPU with less than any.
  for (const Older& gpu :
       {Older{80, 108, 166912, 3}, {89, 142, 101376, 3}, {75, 68, 65536, 1}, {0, 8, 49152, 0}}) {
    GpuFigures other = h200;
    other.compute = gpu.compute;
    other.multiprocessors = gpu.multiprocessors;
    other.shared_bytes = gpu.shared_bytes;
    for (const std::int64_t rows : {1, 64, 65536}) {
      const ProductPlans plans = portable_candidates(sizes(128, rows, 1536, 2048), other);
      EXPECT_EQ(plans.size(), std::max<std::size_t>(1, gpu.tiles));
      for (const ProductPlan& plan : plans) {
        EXPECT_EQ(plan.kernel, ProductPlan::portable);
        EXPECT_GT(plan.us, 0);
        EXPECT_EQ(plan.split, 1);
        EXPECT_EQ(plan.blocks > 0, gpu.tiles > 0);
        EXPECT_LE(plan.blocks, 3 * gpu.multiprocessors);
      }
    }
  }
  // grouped_cuda.cu's.
  ProductSizes s = sizes(4, 100, 64, 64);
  s.in_place = false;
  EXPECT_EQ(portable_candidates(s, h200).size(), 1U);
  EXPECT_EQ(portable_candidates(s, h200).begin()->blocks, 0);
}

}  // namespace
}  // namespace shunt::cuda_engine
