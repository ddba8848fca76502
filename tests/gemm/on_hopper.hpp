// For cases about the GPU kernels that only compute capability 9.0 has.
#pragma once

#include <gtest/gtest.h>

#include "engine.hpp"
#if SHUNT_CUDA_BUILT
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

#define SHUNT_ON_HOPPER_ONLY() \
  if (!::shunt::test::on_hopper()) GTEST_SKIP() << "about Hopper's kernels"
// For cases that the CPU engine runs too.
#define SHUNT_NOT_ON_OTHER_GPUS()                             \
  if (::shunt::test::on_gpu() && !::shunt::test::on_hopper()) \
  GTEST_SKIP() << "GPUs other than Hopper multiply no packed weights"

}  // namespace shunt::test
