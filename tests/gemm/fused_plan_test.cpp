// The plan of both products of few rows in one launch: sizes in, units and stages out.
#include <gtest/gtest.h>

#include "gemm/fused_few.hpp"
#if SHUNT_CUDA_BUILT

namespace shunt {
namespace {

using cuda_engine::FusedPlan;

TEST(FusedPlan, IsAFunctionOfSizes) {
  const cuda_engine::GpuFigures h200{.compute = 90,
                                     .multiprocessors = 132,
                                     .shared_bytes = 232448,
                                     .largest_cluster = 16,
                                     .read_gbps = 4800,
                                     .clock_ghz = 1.98};
  const cuda_engine::FusedForm plain{};
  const auto plan_for = [&](std::int64_t rows) {
    return fastest(
        cuda_engine::fused_candidates(plain, {1536, 2048}, {2048, 768}, 128, rows, h200));
  };
  const FusedPlan one = plan_for(8), more = plan_for(128);
  EXPECT_EQ(one.blocks, 132);
  EXPECT_LT(one.unit_rows[0], 128);  // 96 tiles of 128 rows for 132 multiprocessors
  EXPECT_GT(more.us, one.us);
  for (const FusedPlan& plan :
       cuda_engine::fused_candidates(plain, {1536, 2048}, {2048, 768}, 128, 8, h200)) {
    EXPECT_LE(cuda_engine::fused_fixed_bytes + plan.stages * plan.stage_bytes, 232448 - 1024);
    EXPECT_GE(plan.us, one.us);
  }
  EXPECT_EQ(plan_for(1025).blocks, 0);
  cuda_engine::GpuFigures ampere = h200;
  ampere.compute = 80;
  EXPECT_EQ(fastest(cuda_engine::fused_candidates(plain, {1536, 2048}, {2048, 768}, 128, 8, ampere))
                .blocks,
            0);
}

}  // namespace
}  // namespace shunt
#endif
