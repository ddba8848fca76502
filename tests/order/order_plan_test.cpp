// How the sort is laid over a GPU, checked without one.
#include <gtest/gtest.h>

#include <bit>

#include "order/sort_plan.hpp"

namespace shunt::ordering {
namespace {

constexpr SortLimits hopper{.multiprocessors = 132, .shared_bytes = 232448, .largest_cluster = 8};
constexpr SortLimits ampere{.multiprocessors = 108, .shared_bytes = 166912, .largest_cluster = 1};

OrderCall call_of(std::int64_t tokens, int slots, int locals, bool padded) {
  static std::int32_t anything = 0;
  OrderCall call{.tokens = tokens, .slots = slots, .experts = locals, .locals = locals};
  if (padded) {
    call.tile = 128;
    call.capacity = (tokens * slots / 128 + locals) * 128;
    call.num_sorted_tiles = &anything;
  }
  return call;
}

TEST(SortPlan, SaysHowManyExpertsFit) {
  for (const int bytes : {99 << 10, 163 << 10, 227 << 10}) {
    for (const bool padded : {false, true}) {
      const int most = most_locals_in(bytes, padded);
      SortLimits limits = ampere;
      limits.shared_bytes = bytes;
      const auto plan = [&](int locals) {
        return make_plan(call_of(4096, 8, locals, padded), limits, 1, 1, 512);
      };
      EXPECT_LE(plan(most).shared_bytes(), static_cast<std::size_t>(bytes));
      if (most < (padded ? most_locals_padded : most_locals)) {
        EXPECT_THROW(plan(most + 1), Error);
      }
    }
  }
}

// Every pair is placed by one warp, and the tables fit.
TEST(SortPlan, CoversEveryPair) {
  for (const SortLimits& limits : {hopper, ampere}) {
    for (const std::int64_t tokens : {0, 1, 3, 64, 511, 2048, 8192, 32768, 65536, 1 << 24}) {
      for (const int slots : {1, 8, 127}) {
        for (const int locals : {1, 8, 128, 385, 1024, 4096, 8192, 16384}) {
          for (const bool padded : {false, true}) {
            if (padded && locals > most_locals_padded) continue;
            const OrderCall call = call_of(tokens, slots, locals, padded);
            if (limits.shared_bytes < hopper.shared_bytes && locals > 4096) continue;
            const SortPlan plan = choose_plan(call, limits);
            if (plan.compare_lanes > 0) {
              ASSERT_LE(tokens * slots, most_compared);
              ASSERT_EQ(plan.padded, padded);
              if (padded) {
                ASSERT_GE(plan.threads, static_cast<unsigned>(locals));
              }
              ASSERT_TRUE(std::has_single_bit(plan.compare_lanes) && plan.compare_lanes <= 32);
              ASSERT_EQ(plan.threads % 32, 0U);
              ASSERT_GE(plan.shared_bytes(), static_cast<std::size_t>(tokens * slots) * 4);
            } else {
              const auto covered = std::int64_t{plan.segment} * plan.cluster;
              ASSERT_GE(covered, tokens * slots);
              ASSERT_LT(covered, std::int64_t{1} << 32);
              ASSERT_EQ(plan.share, plan.rows * plan.chunks * 32);
              ASSERT_EQ(plan.segment, plan.share * plan.parts);
              ASSERT_LE(plan.rows * 32, plan.threads);
              ASSERT_GT(plan.stride, static_cast<unsigned>(locals));
            }
            ASSERT_LE(plan.threads, 1024U);
            ASSERT_LE(plan.cluster, limits.largest_cluster);
            ASSERT_LE(plan.parts * plan.cluster, static_cast<unsigned>(limits.multiprocessors));
            ASSERT_LE(plan.shared_bytes(), static_cast<std::size_t>(limits.shared_bytes));
          }
        }
      }
    }
  }
}

TEST(SortPlan, AFewTokensTakeFewBlocks) {
  const SortPlan plan = choose_plan(call_of(1, 8, 128, false), hopper);
  EXPECT_EQ(plan.cluster, 1U);
  EXPECT_EQ(plan.compare_lanes, 4U);
  EXPECT_GE(plan.parts * plan.threads, 4 * (8U + 128U + 1U));
  EXPECT_LE(plan.parts, 4U);
}

TEST(SortPlan, ALargeBufferIsZeroedByBlocksOfItsOwn) {
  OrderCall call = call_of(8192, 8, 128, false);
  EXPECT_EQ(choose_plan(call, hopper).zero_blocks, 0U);
  call.zeroed_bytes = std::size_t{8192} * 7168 * 2;
  const SortPlan plan = choose_plan(call, hopper);
  EXPECT_GT(plan.zero_blocks, 100U);
  EXPECT_EQ(plan.zero_blocks % plan.cluster, 0U);
}

TEST(SortPlan, RefusesWhatDoesNotFitTheGpu) {
  const OrderCall call = call_of(64, 8, 8192, true);
  EXPECT_NO_THROW(choose_plan(call, hopper));
  try {
    choose_plan(call, {.multiprocessors = 142, .shared_bytes = 101376, .largest_cluster = 1});
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported);
    EXPECT_NE(std::string(error.what()).find("local_experts is 8192"), std::string::npos);
  }
}

}  // namespace
}  // namespace shunt::ordering
