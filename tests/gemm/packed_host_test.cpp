// The prepared layout of packed weights, and which kernel a product of them takes: for figures of
// an H200, without one.
#include <gtest/gtest.h>

#include <set>

#include "gemm/h200.hpp"
#include "gemm/packed_data.hpp"
#include "gemm/packed_layout.hpp"
#include "gemm/packed_plan.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/rounding_plan.hpp"

namespace shunt::cuda_engine {
namespace {

TEST(PackedLayout, EveryWeightHasABytePiecesOfSixteenStayTogether) {
  for (const bool paired : {false, true}) {
    const PackedLayout layout{Format::fp8_block, 200, 300, paired};
    std::set<std::int64_t> seen;
    for (std::int64_t row = 0; row < layout.rows(); ++row) {
      for (std::int64_t k = 0; k < layout.k; ++k) {
        const std::int64_t byte = layout.byte(row, k);
        EXPECT_TRUE(seen.insert(byte).second);
        EXPECT_LT(byte, layout.scales_at());
        EXPECT_EQ(byte % 16, k % 16);
        // Bits 4 to 6 of an address within 1024 bytes are exchanged with bits 7 to 9.
        EXPECT_EQ(byte / 16384, row / 128 * layout.steps() + k / 128);
        EXPECT_EQ((byte ^ (byte >> 3 & 0x70)) % 16384, row % 128 * 128 + k % 128);
      }
    }
    EXPECT_EQ(layout.group_bytes() % 64, 0);
    EXPECT_GE(layout.group_bytes(), layout.scales_at() + 4 * layout.scale_count());
  }
}

#if SHUNT_CUDA_BUILT
TEST(PackedLayout, WeightsComeBackExactly) {
  for (const Format format : {Format::fp8_block, Format::fp8_channel, Format::fp8_tensor}) {
    for (const auto& [n, k] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {130, 129}, {264, 400}, {72, 16}}) {
      const test::Fp8Matrix gate(format, n, k, 1), up(format, n, k, 2);
      EXPECT_NO_THROW(check_packed("gate", gate.matrix, Device{}));
      for (const bool paired : {false, true}) {
        const PackedLayout layout{format, paired ? 2 * n : n, k, paired};
        std::vector<char> bytes(static_cast<std::size_t>(layout.group_bytes()));
        lay_out(layout, gate.matrix, paired ? &up.matrix : nullptr, bytes.data());
        for (std::int64_t row = 0; row < layout.n; ++row) {
          const test::Fp8Matrix& from = row < n ? gate : up;
          for (std::int64_t i = 0; i < k; ++i) {
            ASSERT_EQ(weight_of(layout, bytes.data(), row, i),
                      from.code(row % n, i) * from.scale(row % n, i))
                << "row " << row << " at " << i;
          }
        }
      }
    }
  }
}

PackedSizes sizes(int groups, std::int64_t rows, std::int64_t n, std::int64_t k, bool packed) {
  return {.groups = groups,
          .rows = rows,
          .group_rows = n,
          .k = k,
          .packed_rows = packed,
          .rows_in_place = packed};
}

TEST(PackedPlan, ManyRowsAndFew) {
  for (const auto& s : {sizes(16, 16384, 2048, 5120, true), sizes(128, 16384, 5120, 1024, true)}) {
    EXPECT_EQ(plan_packed(s, h200).kernel, PackedPlan::many_rows) << describe(plan_packed(s, h200));
  }
  for (const auto& s : {sizes(16, 128, 2048, 5120, true), sizes(128, 128, 5120, 1024, false),
                        sizes(128, 8, 1536, 2048, false)}) {
    const PackedPlan plan = plan_packed(s, h200);
    EXPECT_EQ(plan.kernel, PackedPlan::few_rows) << describe(plan);
    EXPECT_LE(plan.tile_tokens, 16);
  }
  EXPECT_GE(plan_packed(sizes(32, 1, 4096, 7168, false), h200).split, 2);
}

// What was faster on an H100, whose memory takes longer than the products of each of these tiles:
// Qwen3-30B-A3B's, rows in fp8 (docs/notes/cuda-fp8.md, "Where memory decides" and "Tiles that
// nearly every group fits").
TEST(PackedPlan, SlowerMemoryTakesTilesThatHoldTheRows) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  for (const auto& [tokens, tile] :
       {std::pair{4, 8}, {16, 8}, {32, 8}, {128, 16}, {192, 32}, {224, 32}, {256, 32}, {448, 64}}) {
    for (const auto& s : {sizes(128, std::int64_t{8} * tokens, 1536, 2048, true),
                          sizes(128, std::int64_t{8} * tokens, 2048, 768, true)}) {
      const PackedPlan plan = plan_packed(s, h100);
      EXPECT_EQ(plan.kernel, PackedPlan::few_rows) << describe(plan);
      EXPECT_EQ(plan.tile_tokens, tile) << describe(plan);
    }
  }
}

// Qwen3-30B-A3B: gate and up [2 x 768, 2048], down [2048, 768], 8 of 128 experts a token.
TEST(PackedPlan, RowsAreRoundedOnTheWayThenBetweenThenByTheProduct) {
  const auto of = [](std::int64_t tokens) {
    return plan_rounding(sizes(128, 8 * tokens, 1536, 2048, true),
                         sizes(128, 8 * tokens, 2048, 768, true), h200);
  };
  for (const std::int64_t tokens : {1, 4, 16, 64}) EXPECT_EQ(of(tokens), Rounding::on_the_way);
  EXPECT_EQ(of(256), Rounding::between);
  EXPECT_EQ(of(8192), Rounding::by_product);
}

// An odd k, which the product that writes fp8 does not take.
TEST(PackedPlan, WhateverWayRowsAreRoundedBothProductsHaveAKernel) {
  for (const std::int64_t k : {89, 127, 128, 2047}) {
    for (const std::int64_t columns : {7, 192, 1535}) {
      for (const std::int64_t rows : {8, 2046, 65536}) {
        PackedSizes gate_up = sizes(20, rows, 2 * columns, k, true);
        PackedSizes down = sizes(20, rows, k, columns, true);
        const Rounding way = plan_rounding(gate_up, down, h200);
        gate_up.packed_rows = gate_up.rows_in_place = way != Rounding::on_the_way;
        down.packed_rows = down.rows_in_place = gate_up.packed_rows;
        gate_up.packed_out = way == Rounding::by_product;
        EXPECT_NE(plan_packed(gate_up, h200).kernel, PackedPlan::none) << k << ", " << rows;
        EXPECT_NE(plan_packed(down, h200).kernel, PackedPlan::none) << columns << ", " << rows;
      }
    }
  }
}

TEST(PackedPlan, WhatNeedsOneKernelGetsIt) {
  for (const int groups : {1, 7, 128, 1024}) {
    for (const std::int64_t rows : {1, 64, 65536}) {
      for (const std::int64_t n : {1, 1408, 5760}) {
        for (const std::int64_t k : {1, 128, 300, 2880}) {
          PackedSizes s = sizes(groups, rows, n, k, true);
          for (const PackedPlan& plan : candidates(s, h200)) {
            EXPECT_GT(plan.us, 0);
            const int cluster = plan.kernel == PackedPlan::many_rows ? 2 : plan.split;
            EXPECT_GT(plan.blocks, 0);
            const bool together = plan.kernel == PackedPlan::few_rows && plan.tile_tokens <= 16;
            EXPECT_LE(plan.blocks, together && plan.split == 1 ? 264 : 132);
            EXPECT_EQ(plan.blocks % cluster, 0);
            EXPECT_LE(plan.split, (k + 127) / 128);
          }
          s.packed_out = true;
          EXPECT_EQ(plan_packed(s, h200).kernel,
                    k % 2 == 0 ? PackedPlan::many_rows : PackedPlan::none);
          s = sizes(groups, rows, n, k, false);
          EXPECT_EQ(plan_packed(s, h200).kernel, PackedPlan::few_rows);
        }
      }
    }
  }
  PackedSizes s = sizes(4, 100, 64, 64, true);
  GpuFigures other = h200;
  other.compute = 80;
  EXPECT_EQ(plan_packed(s, other).kernel, PackedPlan::none);
  s.groups = 1025;
  EXPECT_EQ(plan_packed(s, h200).kernel, PackedPlan::none);
}
#endif

}  // namespace
}  // namespace shunt::cuda_engine
