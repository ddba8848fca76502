// How a router is laid out on a GPU: nothing here needs one.
#include "route/router_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace shunt::test {
namespace {

using routing::plan_router;
using routing::router_workspace_bytes;
using routing::RouterKernel;
using routing::RouterOperands;
using routing::RouterPlan;

cuda_engine::Gpu h200() {
  return {.compute = 90,
          .multiprocessors = 132,
          .shared_bytes = 232448,
          .largest_cluster = 8,
          .widest_cluster = 16,
          .clusters = {0, 132, 66, 43, 30, 23, 20, 15, 15}};
}
cuda_engine::Gpu b200() {
  return {.compute = 100,
          .multiprocessors = 148,
          .shared_bytes = 232448,
          .largest_cluster = 8,
          .widest_cluster = 8};
}
cuda_engine::Gpu a100() { return {.compute = 80, .multiprocessors = 108, .shared_bytes = 166912}; }
cuda_engine::Gpu l4() { return {.compute = 89, .multiprocessors = 58, .shared_bytes = 101376}; }
cuda_engine::Gpu rtx5090() {
  return {.compute = 120,
          .multiprocessors = 170,
          .shared_bytes = 101376,
          .largest_cluster = 8,
          .widest_cluster = 8};
}

TEST(RouterPlan, FewTokensOccupyTheGpu) {
  for (const auto& [tokens, columns, hidden] :
       {std::array{1, 256, 7168}, std::array{1, 128, 7168}, std::array{1, 384, 7168},
        std::array{1, 512, 4096}, std::array{8, 256, 7168}, std::array{16, 256, 7168}}) {
    const RouterPlan p = plan_router(h200(), tokens, columns, hidden, RouterOperands::boxes);
    EXPECT_EQ(p.kernel, RouterKernel::few);
    EXPECT_GE(p.rows, tokens);
    const int blocks = (columns + p.columns - 1) / p.columns * p.parts;
    EXPECT_GE(blocks, 96) << tokens << " x " << columns;
    EXPECT_LE(blocks, 132) << tokens << " x " << columns;
  }
}

// What fixes the order of a sum follows from C and H alone where it must.
TEST(RouterPlan, BatchInvariantRoutersSumAlikeForAnyNumberOfTokens) {
  for (const cuda_engine::Gpu& gpu : {h200(), b200(), a100(), l4(), rtx5090()}) {
    for (const auto operands :
         {RouterOperands::boxes, RouterOperands::whole, RouterOperands::any}) {
      for (const int columns : {8, 64, 128, 256, 512, 600}) {
        for (const int hidden : {32, 128, 2048, 7168}) {
          const RouterPlan first = plan_router(gpu, 1, columns, hidden, operands, true);
          for (const int tokens : {2, 7, 16, 17, 64, 100, 128, 1000, 4096, 100000}) {
            const RouterPlan p = plan_router(gpu, tokens, columns, hidden, operands, true);
            EXPECT_EQ(p.kernel, first.kernel) << tokens << " x " << columns << " x " << hidden;
            EXPECT_EQ(p.parts, first.parts) << tokens << " x " << columns << " x " << hidden;
            EXPECT_EQ(p.ranks, first.ranks) << tokens << " x " << columns << " x " << hidden;
            EXPECT_FALSE(p.meets);
            EXPECT_GE(p.parts, 1);
          }
        }
      }
    }
  }
}

TEST(RouterPlan, SmallRoutersRouteWholeRowsInABlock) {
  for (const auto& [tokens, columns, hidden] :
       {std::array{512, 8, 128}, std::array{512, 16, 128}, std::array{1024, 64, 512}}) {
    const RouterPlan p = plan_router(h200(), tokens, columns, hidden, RouterOperands::boxes);
    EXPECT_EQ(p.kernel, RouterKernel::few);
    EXPECT_EQ(p.rows, 8);
    EXPECT_GE(p.columns, columns);
    EXPECT_EQ(p.parts, p.ranks);
  }
}

// Whatever is launched runs at once, on half of the GPU at least.
TEST(RouterPlan, ManyTokensOccupyTheGpuOnce) {
  for (const auto& [tokens, columns, hidden] :
       {std::array{64, 256, 7168}, std::array{1024, 256, 7168}, std::array{2048, 128, 1024},
        std::array{4096, 64, 2048}, std::array{4096, 128, 2048}, std::array{4096, 256, 7168},
        std::array{8192, 512, 2048}}) {
    const cuda_engine::Gpu gpu = h200();
    const RouterPlan p = plan_router(gpu, tokens, columns, hidden, RouterOperands::boxes);
    EXPECT_EQ(p.kernel, RouterKernel::many);
    const int across = (columns + p.columns - 1) / p.columns * (p.parts / p.ranks);
    const int clusters = ((tokens + p.rows - 1) / p.rows + p.pair - 1) / p.pair * across;
    EXPECT_GE(clusters * p.pair * p.ranks, 64) << tokens << " x " << columns;
    EXPECT_LE(clusters, gpu.clusters[static_cast<std::size_t>(p.pair * p.ranks)])
        << tokens << " x " << columns << " rows " << p.rows << " ranks " << p.ranks << " pair "
        << p.pair;
  }
}

// What kernels take for granted, over all that may be asked.
TEST(RouterPlan, KeepsItsBounds) {
  for (const std::int64_t tokens :
       {1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 127, 129, 1000, 4096, 100000, 10000000}) {
    for (const int columns : {1, 8, 16, 17, 64, 65, 128, 160, 255, 256, 257, 384, 512, 513, 4096}) {
      for (const int hidden : {1, 8, 64, 72, 100, 128, 448, 2048, 2880, 7168, 16384, 1 << 24}) {
        for (const RouterOperands operands :
             {RouterOperands::any, RouterOperands::whole, RouterOperands::boxes}) {
          SCOPED_TRACE(testing::Message() << tokens << " x " << columns << " x " << hidden);
          const cuda_engine::Gpu gpu = h200();
          const RouterPlan p = plan_router(gpu, tokens, columns, hidden, operands);
          EXPECT_GE(p.parts, 1);
          EXPECT_EQ(p.parts % p.ranks, 0);
          EXPECT_LE(p.ranks, p.kernel == RouterKernel::any ? 16 : 8);
          if (operands == RouterOperands::any) {
            EXPECT_EQ(p.kernel, RouterKernel::any);
          }
          if (operands == RouterOperands::boxes) {
            EXPECT_NE(p.kernel, RouterKernel::any);
          }
          if (p.kernel == RouterKernel::many) {
            EXPECT_EQ(operands, RouterOperands::boxes);
            EXPECT_TRUE(p.rows == 64 || p.rows == 128 ||
                        (p.columns == 128 && (p.rows == 16 || p.rows == 32)));
            EXPECT_LE(p.ranks * p.pair, 8);
            EXPECT_TRUE(p.columns < 512 || p.rows == 64);
            const std::int64_t tiles = (tokens + p.rows - 1) / p.rows;
            if (p.meets) {
              EXPECT_LE(tiles * p.ranks, 16);  // tickets
              EXPECT_LE(p.parts / p.ranks, 16);
              EXPECT_LE(static_cast<std::size_t>(std::int64_t{p.parts / p.ranks} * tokens *
                                                 ((std::int64_t{columns} + 3) / 4 * 16)),
                        router_workspace_bytes(h200(), tokens, columns));
            } else {
              EXPECT_EQ(p.parts, p.ranks);
            }
            EXPECT_LE(p.parts, (hidden + 63) / 64);
            EXPECT_TRUE(p.columns >= columns || columns > 512 || p.meets);
            EXPECT_TRUE(columns <= 512 || p.columns == 256);
          }
          if (p.kernel != RouterKernel::few) continue;
          EXPECT_LE(columns, 512);
          EXPECT_EQ(hidden % 8, 0);
          const std::int64_t tiles = (tokens + p.rows - 1) / p.rows;
          const int groups = p.parts / p.ranks;
          EXPECT_LE(groups, 16);
          EXPECT_TRUE(p.rows == 8 ? p.columns == 16 || p.columns == 64
                                  : p.columns == (p.rows == 16 ? 16 : 32));
          // Shared memory: sums of 8 warps, or of one and the rows that a rank routes.
          const int sums = p.rows * (p.columns + 4);
          const int share = (p.rows + p.ranks - 1) / p.ranks;
          EXPECT_LE(4 * std::max(8 * sums, sums + share * (columns + 7)), 227 * 1024);
          if (groups > 1 || columns > p.columns) {
            EXPECT_EQ(tiles, 1);  // one ticket a rank
            EXPECT_LE(static_cast<std::size_t>(std::int64_t{groups} * tokens *
                                               ((std::int64_t{columns} + 3) / 4 * 16)),
                      router_workspace_bytes(h200(), tokens, columns));
          } else {
            EXPECT_LE(tiles, 65535);
          }
        }
      }
    }
  }
}

TEST(RouterPlan, OlderGpusHaveTheOneKernel) {
  for (const std::int64_t tokens : {1, 64, 65, 5000}) {
    const RouterPlan p = plan_router(l4(), tokens, 64, 512, RouterOperands::boxes);
    EXPECT_EQ(p.kernel, RouterKernel::any);
    EXPECT_EQ(p.parts, 1);
  }
}

TEST(RouterPlan, BlackwellRoutesWholeTiles) {
  for (const int columns : {8, 65, 128, 160, 256, 257, 512}) {
    for (const int hidden : {72, 100, 2048, 7168}) {
      for (const std::int64_t tokens : {5000, 1000000}) {
        SCOPED_TRACE(testing::Message() << tokens << " x " << columns << " x " << hidden);
        const RouterPlan p = plan_router(b200(), tokens, columns, hidden, RouterOperands::boxes);
        EXPECT_EQ(p.kernel, RouterKernel::blackwell);
        EXPECT_EQ(p.rows, 128);
        EXPECT_TRUE(p.columns == 64 || p.columns == 128 || p.columns == 256 || p.columns == 512);
        EXPECT_GE(p.columns, columns);
        EXPECT_TRUE(p.columns == 64 || p.columns < 2 * columns);
        EXPECT_EQ(p.parts, 1);
        EXPECT_EQ(p.ranks, 1);
      }
    }
  }
}

TEST(RouterPlan, BlackwellTakesTheOtherKernelsWhereItsOwnDoesNotFit) {
  const auto kernel = [](int compute, std::int64_t tokens, int columns, RouterOperands operands) {
    cuda_engine::Gpu gpu = b200();
    gpu.compute = compute;
    return plan_router(gpu, tokens, columns, 2048, operands).kernel;
  };
  EXPECT_EQ(kernel(100, 5000, 256, RouterOperands::boxes), RouterKernel::blackwell);
  EXPECT_EQ(kernel(100, 5000, 513, RouterOperands::boxes), RouterKernel::any);
  EXPECT_EQ(kernel(100, 5000, 256, RouterOperands::whole), RouterKernel::any);
  EXPECT_EQ(kernel(100, 5000, 256, RouterOperands::any), RouterKernel::any);
  EXPECT_EQ(kernel(100, 1, 256, RouterOperands::boxes), RouterKernel::few);
  EXPECT_EQ(kernel(103, 5000, 256, RouterOperands::boxes), RouterKernel::any);
  EXPECT_EQ(kernel(120, 5000, 256, RouterOperands::boxes), RouterKernel::any);
}

// Each GPU has its own shared memory, of which 1 KB is for what the kernel has beside.
TEST(RouterPlan, TheOneKernelFitsEveryGpu) {
  using routing::any_bytes;
  for (const cuda_engine::Gpu& gpu : {h200(), b200(), a100(), l4(), rtx5090()}) {
    const int widest = routing::widest_any_tile(gpu);
    EXPECT_EQ(widest, gpu.shared_bytes > 150000 ? 512 : 256);
    for (const bool invariant : {false, true}) {
      for (const int columns : {1, 8, 64, 65, 128, 160, 256, 257, 384, 512, 513, 4096}) {
        for (const int hidden : {8, 64, 512, 4096, 7168}) {
          for (const std::int64_t tokens : {1, 16, 17, 64, 65, 512, 870, 1025, 4096, 100000}) {
            SCOPED_TRACE(testing::Message()
                         << gpu.compute << ": " << tokens << " x " << columns << " x " << hidden);
            const RouterPlan p =
                plan_router(gpu, tokens, columns, hidden, RouterOperands::any, invariant);
            ASSERT_EQ(p.kernel, RouterKernel::any);
            EXPECT_GE(p.stages, 2);
            EXPECT_LE(p.stages, 8);
            EXPECT_LE(p.parts, p.rows);
            EXPECT_EQ(p.columns, std::min(columns <= 64    ? 64
                                          : columns <= 128 ? 128
                                          : columns <= 256 ? 256
                                                           : 512,
                                          widest));
            for (const bool split : {false, true}) {
              EXPECT_LE(any_bytes(split, p.rows, p.columns, p.parts, p.stages) + 1024,
                        gpu.shared_bytes);
            }
            if (columns > p.columns) {  // logits in memory
              EXPECT_GE(router_workspace_bytes(gpu, tokens, columns),
                        static_cast<std::size_t>(tokens * columns * 4));
            }
          }
        }
      }
    }
  }
}

TEST(RouterPlan, WorkspaceOfManyTokensServesFewer) {
  for (const cuda_engine::Gpu& gpu : {h200(), l4()}) {
    for (const int columns : {1, 17, 256, 257, 512, 513, 4096}) {
      std::size_t last = 0;
      for (const std::int64_t tokens : {0, 1, 4, 5, 64, 65, 100000}) {
        EXPECT_GE(router_workspace_bytes(gpu, tokens, columns), last);
        last = router_workspace_bytes(gpu, tokens, columns);
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
