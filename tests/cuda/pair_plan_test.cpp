// How products of few pairs are cut over a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "gemm/pair_stream.hpp"

namespace shunt::cuda_engine {
namespace {

TEST(PairPlan, AsManyWarpsAsFitAtOnce) {
  constexpr int multiprocessors = 132;
  for (const int tiles : {1, 7, 96, 128, 360, 448}) {
    for (const double hit : {1.0, 2.0, 8.0, 29.1}) {
      for (const int steps : {1, 3, 6, 16, 56}) {
        for (const int least : {1, 2}) {
          const PairPlan plan = plan_pairs(tiles, steps, hit, multiprocessors,
                                           {.least = least, .most = 24, .longest = 10});
          const auto blocks = [&](int parts, int sets) {
            const int of_group = (tiles + sets - 1) / sets;
            return std::ceil(hit * of_group) * parts * sets;
          };
          if (plan.parts == 0) {
            EXPECT_TRUE(least > steps || blocks(least, 4 / least) > multiprocessors * 16 ||
                        steps > 16 * least);
            continue;
          }
          EXPECT_TRUE(plan.warps == 16 || plan.warps == 24);
          EXPECT_GE(plan.parts, least);
          EXPECT_LE(plan.parts, steps);
          EXPECT_LE(plan.parts * plan.sets, 8);
          EXPECT_LE(blocks(plan.parts, plan.sets), multiprocessors * plan.warps);
          EXPECT_LE(steps, (plan.warps == 16 ? 16 : 24) * plan.parts);
        }
      }
    }
  }
}

// Products in 4 bits: 128 groups of 96 and of 128 tiles, 8 of them hit (Qwen3-30B-A3B at one
// token); 4 of 360 tiles (gpt-oss-20b); 29 of 96.
TEST(PairPlan, OfKnownLayers) {
  constexpr PairLimits four_bits{.least = 1, .most = 24, .longest = 10};
  for (const auto& [tiles, steps] : {std::pair{96, 16}, {128, 6}}) {
    const PairPlan plan = plan_pairs(tiles, steps, groups_hit(128, 8, 1), 132, four_bits);
    EXPECT_EQ(plan.parts, 2);
    EXPECT_EQ(plan.sets, 2);
    EXPECT_EQ(plan.warps, 16);
  }
  const PairPlan more = plan_pairs(360, 23, 4, 132, four_bits);
  EXPECT_EQ(more.parts, 2);
  EXPECT_EQ(more.warps, 24);
  EXPECT_EQ(plan_pairs(180, 23, 4, 132, four_bits).parts, 4);
  EXPECT_EQ(plan_pairs(360, 23, 4, 132, {.least = 2, .most = 16, .longest = 16}).parts, 0);
  EXPECT_EQ(plan_pairs(96, 16, groups_hit(128, 32, 4), 132, four_bits).parts, 0);
  // By tiles of 32 rows of weights, each with all of k: Qwen3-30B-A3B's fit at four tokens,
  // gpt-oss-20b's would be too long at two.
  constexpr PairLimits whole_k{.least = 1, .most = 16, .longest = 16, .most_parts = 1};
  for (const auto& [tiles, steps] : {std::pair{48, 16}, {64, 6}}) {
    const PairPlan plan = plan_pairs(tiles, steps, groups_hit(128, 32, 4), 132, whole_k);
    EXPECT_EQ(plan.parts, 1);
    EXPECT_EQ(plan.sets, 4);
  }
  EXPECT_EQ(plan_pairs(90, 23, groups_hit(32, 8, 2), 132, whole_k).parts, 0);
}

TEST(PairPlan, GroupsThatPairsHit) {
  EXPECT_DOUBLE_EQ(groups_hit(128, 8, 1), 8);
  EXPECT_NEAR(groups_hit(128, 32, 4), 128 * (1 - std::pow(15.0 / 16, 4)), 1e-9);
  EXPECT_DOUBLE_EQ(groups_hit(8, 8, 1), 8);
  EXPECT_DOUBLE_EQ(groups_hit(2, 16, 8), 2);
  EXPECT_DOUBLE_EQ(groups_hit(1, 1, 1), 1);
}

TEST(PairPlan, RowsThatABlockHasRoomFor) {
  const std::int32_t id = 0;
  FewChain chain{.ids = &id, .pairs = 8, .tokens = 8};
  EXPECT_TRUE(pairs_stream(chain, 2048));
  EXPECT_FALSE(pairs_stream(chain, 2052));
  EXPECT_FALSE(pairs_stream(chain, 7168));
  chain.tokens = 1;
  EXPECT_TRUE(pairs_stream(chain, 14336));
  chain.ids = nullptr;
  EXPECT_FALSE(pairs_stream(chain, 2048));
}

}  // namespace
}  // namespace shunt::cuda_engine
