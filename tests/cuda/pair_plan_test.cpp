// How products of few pairs are cut over a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "gemm/pair_stream.hpp"

namespace shunt::cuda_engine {
namespace {

constexpr int multiprocessors = 132;
constexpr std::int64_t shared_bytes = std::int64_t{227} * 1024;

PairPlan plan(int tiles, int steps, double hit, const PairLimits& limits) {
  return plan_pairs({.tiles = tiles, .steps = steps, .groups_hit = hit}, limits, multiprocessors,
                    shared_bytes);
}

TEST(PairPlan, AsManyWarpsAsFitAtOnce) {
  for (const int tiles : {1, 7, 96, 128, 360, 448}) {
    for (const double hit : {1.0, 2.0, 8.0, 29.1}) {
      for (const int steps : {1, 3, 6, 16, 56}) {
        for (const int least : {1, 2}) {
          const PairPlan cut = plan(tiles, steps, hit, {.least = least, .most = 24, .longest = 10});
          const auto blocks = [&](int parts, int sets) {
            const int of_group = (tiles + sets - 1) / sets;
            return std::ceil(hit * of_group) * parts * sets;
          };
          if (cut.parts == 0) {
            EXPECT_TRUE(least > steps || blocks(least, 4 / least) > multiprocessors * 16 ||
                        steps > 16 * least);
            continue;
          }
          EXPECT_TRUE(cut.warps == 16 || cut.warps == 24);
          EXPECT_GE(cut.parts, least);
          EXPECT_LE(cut.parts, steps);
          EXPECT_LE(cut.parts * cut.sets, 8);
          EXPECT_LE(blocks(cut.parts, cut.sets), multiprocessors * cut.warps);
          EXPECT_LE(steps, (cut.warps == 16 ? 16 : 24) * cut.parts);
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
    const PairPlan cut = plan(tiles, steps, groups_hit(128, 8, 1), four_bits);
    EXPECT_EQ(cut.parts, 2);
    EXPECT_EQ(cut.sets, 2);
    EXPECT_EQ(cut.warps, 16);
  }
  const PairPlan more = plan(360, 23, 4, four_bits);
  EXPECT_EQ(more.parts, 2);
  EXPECT_EQ(more.warps, 24);
  EXPECT_EQ(plan(180, 23, 4, four_bits).parts, 4);
  EXPECT_EQ(plan(360, 23, 4, {.least = 2, .most = 16, .longest = 16}).parts, 0);
  // Of three tokens 24 warps fit with all of k each, of four they would but for their rows.
  PairSizes few{.tiles = 96,
                .steps = 16,
                .groups_hit = groups_hit(128, 24, 3),
                .tokens = 3,
                .row_bytes = 3 * 4112,
                .warp_bytes = 8 * 1152 + 512,
                .more_warp_bytes = 6 * 1152 + 512};
  const PairPlan three = plan_pairs(few, four_bits, multiprocessors, shared_bytes);
  EXPECT_EQ(three.parts, 1);
  EXPECT_EQ(three.warps, 24);
  few.groups_hit = groups_hit(128, 32, 4), few.tokens = 4, few.row_bytes = 4 * 4112;
  EXPECT_EQ(plan_pairs(few, four_bits, multiprocessors, shared_bytes).parts, 0);
  // By tiles of 32 rows of weights, each with all of k: Qwen3-30B-A3B's fit at four tokens,
  // gpt-oss-20b's would be too long at two.
  constexpr PairLimits whole_k{.least = 1, .most = 16, .longest = 16, .most_parts = 1};
  for (const auto& [tiles, steps] : {std::pair{48, 16}, {64, 6}}) {
    const PairPlan cut = plan(tiles, steps, groups_hit(128, 32, 4), whole_k);
    EXPECT_EQ(cut.parts, 1);
    EXPECT_EQ(cut.sets, 4);
  }
  EXPECT_EQ(plan(90, 23, groups_hit(32, 8, 2), whole_k).parts, 0);
}

// A first product waits for ids and may have longer parts, where its blocks are shared out evenly:
// Phi-3.5-MoE's one token, two tokens of Qwen3-235B-A22B by tiles of 32 rows, but not of
// Phi-3.5-MoE, of whose 400 blocks four multiprocessors would have a fourth.
TEST(PairPlan, LongPartsOfFirstProducts) {
  constexpr PairLimits four_bits{.least = 1, .most = 24, .longest = 10};
  constexpr PairLimits whole_k{.least = 1, .most = 16, .longest = 16, .most_parts = 1};
  PairSizes sizes{.tiles = 800, .steps = 32, .groups_hit = 2, .most_hit = 2, .waits = true};
  const auto parts = [&](const PairLimits& limits) {
    return plan_pairs(sizes, limits, multiprocessors, shared_bytes).parts;
  };
  EXPECT_EQ(parts(four_bits), 1);
  sizes.waits = false;
  EXPECT_EQ(parts(four_bits), 0);
  sizes = {
      .tiles = 96, .steps = 32, .groups_hit = 15.5, .most_hit = 16, .tokens = 2, .waits = true};
  EXPECT_EQ(parts(whole_k), 1);
  sizes.steps = 33;
  EXPECT_EQ(parts(whole_k), 0);
  sizes = {
      .tiles = 400, .steps = 32, .groups_hit = 3.75, .most_hit = 4, .tokens = 2, .waits = true};
  EXPECT_EQ(parts(whole_k), 0);
}

// A second product of some tokens may not have parts as long as a first one's: four tokens of
// DeepSeek-V3's 32 experts, of which each warp would have all 16 steps.
TEST(PairPlan, LongPartsOfSecondProducts) {
  constexpr PairLimits limits{.least = 1, .most = 16, .longest = 10, .longest_of_early = 12};
  PairSizes sizes{
      .tiles = 448, .steps = 16, .groups_hit = groups_hit(32, 4, 4), .most_hit = 4, .tokens = 4};
  const auto parts = [&] { return plan_pairs(sizes, limits, multiprocessors, shared_bytes).parts; };
  EXPECT_EQ(parts(), 0);
  sizes.steps = 12;
  EXPECT_EQ(parts(), 1);
  sizes.steps = 16, sizes.waits = true;
  EXPECT_EQ(parts(), 1);
  sizes.waits = false, sizes.tokens = 1;
  EXPECT_EQ(parts(), 1);
}

// 24 warps of Qwen3-235B-A22B's first product have no room beside its row of 4096 in six blocks.
TEST(PairPlan, BlocksThatFitSharedMemory) {
  constexpr PairLimits four_bits{.least = 1, .most = 24, .longest = 10};
  PairSizes sizes{.tiles = 192, .steps = 32, .groups_hit = 8, .most_hit = 8, .waits = true};
  const auto cut = [&] { return plan_pairs(sizes, four_bits, multiprocessors, shared_bytes); };
  EXPECT_EQ(cut().warps, 24);
  sizes.row_bytes = 8320;
  sizes.warp_bytes = 8 * 1152 + 512;
  sizes.more_warp_bytes = 6 * 1152 + 512;
  EXPECT_EQ(cut().warps, 16);
  EXPECT_EQ(cut().parts, 1);
}

// A multiprocessor has room for its share of blocks and for no more: four of the 448 of down of
// DeepSeek-V3's one token.
TEST(PairPlan, SharesOfBlocks) {
  constexpr std::int64_t all = shared_bytes + own_shared_bytes;
  const auto bytes = [](std::int64_t blocks) {
    return share_bytes(blocks, multiprocessors, shared_bytes);
  };
  for (const int share : {2, 3, 4, 5, 8, 16}) {
    for (const int blocks : {multiprocessors * (share - 1) + 1, multiprocessors * share}) {
      EXPECT_EQ(bytes(blocks) % 128, 0);
      EXPECT_LE(share * (bytes(blocks) + own_shared_bytes), all) << share;
      EXPECT_GT((share + 1) * (bytes(blocks) + own_shared_bytes), all) << share;
    }
  }
  EXPECT_EQ(bytes(448), 45696);
  EXPECT_EQ(bytes(multiprocessors), 0);  // one each
  EXPECT_EQ(bytes(4), 0);
  // A share is never more than what a block may ask for.
  for (const std::int64_t less : {std::int64_t{99} * 1024, shared_bytes}) {
    EXPECT_LE(share_bytes(multiprocessors + 1, multiprocessors, less), less);
  }
}

TEST(PairPlan, WhatSharesBlocks) {
  const auto shares = [](bool dependent, bool beside, int tokens) {
    Gpu gpu;
    gpu.dependent_launch = dependent;
    PairArgs args;
    args.beside = beside, args.tokens = tokens;
    return shares_blocks(gpu, args);
  };
  for (const int tokens : {1, 2, 3, 8}) {
    EXPECT_TRUE(shares(true, false, tokens));
    EXPECT_EQ(shares(true, true, tokens), tokens > 2);
    EXPECT_FALSE(shares(false, false, tokens));
  }
}

// Six of a warp's steps under way, and as many and more behind them.
TEST(PairPlan, WhatLetsTheNextProductStartLate) {
  constexpr int depth = 6, at_once = -1;
  const PairLimits limits{
      .least = 1, .most = 24, .longest = 16, .most_late = 16, .of_one = 8, .left_of_one = 4};
  const auto left = [&](bool dependent, bool early, int warps, int steps) {
    Gpu gpu;
    gpu.dependent_launch = dependent;
    PairArgs args;
    args.early = early, args.each = steps;
    return next_left(gpu, args, {.parts = 1, .warps = warps}, limits, depth);
  };
  EXPECT_EQ(left(true, false, 16, 12), 8);
  EXPECT_EQ(left(true, false, 16, 11), at_once);
  EXPECT_EQ(left(true, false, 24, 12), at_once);
  EXPECT_EQ(left(true, true, 16, 12), at_once);
  EXPECT_EQ(left(false, false, 16, 12), at_once);
  EXPECT_EQ(left(true, false, 8, 7), 4);
  EXPECT_EQ(left(true, true, 8, 7), at_once);
  PairArgs beside;  // where shares are not asked for
  beside.beside = true, beside.tokens = 1, beside.each = 12;
  Gpu gpu;
  gpu.dependent_launch = true;
  EXPECT_FALSE(shares_blocks(gpu, beside));
  EXPECT_EQ(next_left(gpu, beside, {.parts = 1, .warps = 16}, limits, depth), 8);
}

// One token in fp8, gate_up and down: Qwen3-30B-A3B, DeepSeek-V3 on one of 8, 256 experts of 512;
// Qwen3-235B-A22B has more tiles than eight warps of a multiprocessor.
TEST(PairPlan, FewWarpsForOneToken) {
  constexpr PairLimits limits{.least = 2, .most = 16, .longest = 16, .of_one = 8};
  const auto cut = [&](int tiles, int steps, double hit, bool waits) {
    return plan_pairs({.tiles = tiles,
                       .steps = steps,
                       .groups_hit = hit,
                       .waits = waits,
                       .row_bytes = steps * 256 + 128,
                       .warp_bytes = 5 * 2064 + 512,
                       .one_warp_bytes = 6 * 2064 + 512},
                      limits, multiprocessors, shared_bytes);
  };
  const auto is = [](const PairPlan& plan, int parts, int sets, int warps) {
    EXPECT_EQ(plan.parts, parts);
    EXPECT_EQ(plan.sets, sets);
    EXPECT_EQ(plan.warps, warps);
  };
  is(cut(96, 16, 8, true), 1, 6, 8);
  is(cut(128, 6, 8, false), 1, 4, 8);
  is(cut(256, 56, 1, true), 4, 2, 8);
  is(cut(448, 16, 1, false), 2, 2, 8);
  is(cut(64, 16, 8, true), 2, 4, 8);
  is(cut(192, 32, 8, true), 0, 1, 0);
  // Llama 4 Scout's, whose warps would have five steps and four, and gpt-oss-20b's down, of 23: as
  // ever.
  EXPECT_EQ(cut(128, 40, 1, true).warps, 16);
  EXPECT_EQ(cut(320, 8, 1, false).warps, 16);
  EXPECT_EQ(cut(180, 23, 4, false).warps, 16);
  // A first product is a block a multiprocessor, of eight warps at most.
  for (int tiles = 1; tiles <= 1100; ++tiles) {
    for (const double hit : {1.0, 2.0, 8.0}) {
      const PairPlan first = cut(tiles, 16, hit, true);
      if (first.warps == 8) {
        EXPECT_LE(first.parts * first.sets, 8) << tiles;
        const int of_group = (tiles + first.sets - 1) / first.sets;
        EXPECT_LE(hit * of_group, multiprocessors) << tiles;
      }
    }
  }
  // Of two tokens, beside a shared expert, and where a row takes all of the room, as ever.
  PairSizes two{.tiles = 96, .steps = 16, .groups_hit = 8, .tokens = 2, .waits = true};
  EXPECT_EQ(plan_pairs(two, limits, multiprocessors, shared_bytes).warps, 16);
  two.tokens = 1, two.beside = true;
  EXPECT_EQ(plan_pairs(two, limits, multiprocessors, shared_bytes).warps, 16);
  two.beside = false;
  EXPECT_EQ(plan_pairs(two, limits, multiprocessors, shared_bytes).warps, 8);
  two.one_warp_bytes = 6 * 2064 + 512, two.row_bytes = 200 * 1024;
  EXPECT_NE(plan_pairs(two, limits, multiprocessors, shared_bytes).warps, 8);
}

// gate_up of Qwen3-30B-A3B in 16 bits: 24 warps with all of k fit at once for three tokens, for
// four they do not.
TEST(PairPlan, FirstProductsInRounds) {
  constexpr PairLimits limits{.least = 1,
                              .most = 24,
                              .longest = 16,
                              .most_parts = 1,
                              .longest_of_more = 32,
                              .in_rounds = true};
  PairSizes sizes{.tiles = 96,
                  .steps = 32,
                  .groups_hit = groups_hit(128, 24, 3),
                  .most_hit = 24,
                  .tokens = 3,
                  .waits = true,
                  .row_bytes = 3 * 4112,
                  .warp_bytes = 5 * 2048 + 512,
                  .more_warp_bytes = 3 * 2048 + 512};
  const auto parts = [&](bool in_rounds) {
    PairLimits of = limits;
    of.in_rounds = in_rounds;
    return plan_pairs(sizes, of, multiprocessors, shared_bytes).parts;
  };
  EXPECT_EQ(parts(true), 1);
  sizes.groups_hit = groups_hit(128, 32, 4), sizes.most_hit = 32, sizes.tokens = 4;
  sizes.row_bytes = 4 * 4112;
  EXPECT_EQ(parts(false), 0);
  const PairPlan cut = plan_pairs(sizes, limits, multiprocessors, shared_bytes);
  EXPECT_EQ(cut.parts, 2);
  EXPECT_EQ(cut.sets, 4);
  EXPECT_EQ(cut.warps, 24);
  sizes.waits = false;
  EXPECT_EQ(parts(true), 0);
  sizes.waits = true, sizes.tokens = 1;
  EXPECT_EQ(parts(true), 0);
  // Fits at once, but too long: 29 groups of four blocks for 132 multiprocessors, and of three.
  sizes.tokens = 4, sizes.steps = 48, sizes.tiles = 13;
  EXPECT_EQ(parts(false), 0);
  EXPECT_EQ(parts(true), 2);
  sizes.tiles = 12;
  EXPECT_EQ(parts(true), 0);
}

// gate_up of two tokens in fp8, blocks of eight warps with all of k: Qwen3-30B-A3B's 186 fill the
// GPU, those of 64 experts of 512 with 4 a token do not.
TEST(PairPlan, OnlyWhereBlocksFillTheGpu) {
  constexpr PairLimits limits{
      .least = 1, .most = 16, .longest = 16, .most_parts = 1, .block_warps = 8, .fills = true};
  PairSizes sizes{
      .tiles = 96, .steps = 16, .groups_hit = groups_hit(128, 16, 2), .tokens = 2, .waits = true};
  const auto cut = [&] { return plan_pairs(sizes, limits, multiprocessors, shared_bytes); };
  EXPECT_EQ(cut().parts, 1);
  EXPECT_EQ(cut().sets, 8);
  sizes.tiles = 64, sizes.groups_hit = groups_hit(64, 8, 2);
  EXPECT_EQ(cut().parts, 0);
}

// gate_up of one token of Qwen3-Next in 16 and in 4 bits, of two tokens, of GLM-4.5-Air's.
TEST(PairPlan, WhatIsOnePass) {
  EXPECT_TRUE(in_one_pass(1024, 32, 10, multiprocessors));
  EXPECT_FALSE(in_one_pass(1024, 32, 20, multiprocessors));
  EXPECT_TRUE(in_one_pass(1024, 16, 20, multiprocessors));
  EXPECT_FALSE(in_one_pass(2816, 64, 8, multiprocessors));
  EXPECT_FALSE(in_one_pass(1024, 16, 34, multiprocessors));  // more tiles than warps
  EXPECT_TRUE(in_one_pass(16, 128, 1, 1));
  EXPECT_FALSE(in_one_pass(16, 129, 1, 1));
}

// As a grid of 16 warps is cut, but where tiles are left over in sets of four.
TEST(PairPlan, WhatIsOnePassIsCutSo) {
  constexpr PairLimits warps{.least = 1, .most = 16, .longest = 16};
  int one_pass = 0, others = 0;
  for (int tiles = 4; tiles <= 1000; tiles += 4) {
    for (const double hit : {1.0, 2.0, 3.7, 8.0, 15.5, 29.1, 64.0}) {
      for (const int steps : {1, 3, 6, 16, 17, 32, 33, 56, 64, 65, 128, 129}) {
        const bool expected = plan(tiles, steps, hit, warps).parts > 0;
        EXPECT_EQ(in_one_pass(std::int64_t{16} * tiles, steps, hit, multiprocessors), expected)
            << tiles << " tiles, " << steps << " steps, " << hit;
        ++(expected ? one_pass : others);
      }
    }
  }
  EXPECT_GT(one_pass, 1000);
  EXPECT_GT(others, 1000);
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
  EXPECT_TRUE(rows_fit(3, 7168));
  EXPECT_FALSE(rows_fit(4, 7168));
  chain.tokens = 1;
  EXPECT_TRUE(pairs_stream(chain, 14336));
  chain.ids = nullptr;
  EXPECT_FALSE(pairs_stream(chain, 2048));
}

}  // namespace
}  // namespace shunt::cuda_engine
