// For cases about the GPU kernels that only compute capability 9.0 has.
#pragma once

#include <gtest/gtest.h>

#include "engine.hpp"
#if SHUNT_CUDA_BUILT
#include <vector>

#include "gemm/fragment_product.hpp"
#include "gemm/hopper_product.hpp"
#endif

namespace shunt::test {

// Whether tests run on a Hopper, and its own kernels are not switched off.
inline bool on_hopper() {
#if SHUNT_CUDA_BUILT
  return on_gpu() && cuda_engine::figures(cuda().gpu()).compute == 90;
#else
  return false;
#endif
}

#if SHUNT_CUDA_BUILT
// This GPU's plans for packed weights and rows of 16 bits, and what others would run.
inline std::vector<cuda_engine::PackedPlan> every_fragment_plan(
    const cuda_engine::PackedSizes& sizes, const cuda_engine::GpuFigures& gpu) {
  const auto portable = cuda_engine::portable_fragment_candidates(sizes, gpu);
  std::vector<cuda_engine::PackedPlan> plans(portable.begin(), portable.end());
  for (const auto& plan : cuda_engine::fragment_candidates(sizes, gpu)) {
    if (plan.kernel != cuda_engine::PackedPlan::portable) plans.push_back(plan);
  }
  return plans;
}
#endif

#define SHUNT_ON_HOPPER_ONLY() \
  if (!::shunt::test::on_hopper()) GTEST_SKIP() << "about Hopper's kernels"
}  // namespace shunt::test
