// What a launch refuses before the GPU is asked.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT
#include "cuda/launch.hpp"

namespace shunt::cuda_engine {
namespace {

TEST(Launch, RefusesMoreSharedMemoryThanABlockHas) {
  const Gpu gpu{.compute = 89, .shared_bytes = 101376};
  check_fits("route: router", gpu, 101376);
  try {
    check_fits("route: router", gpu, 101377);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported);
    EXPECT_EQ(std::string(error.what()),
              "route: router: needs 101377 bytes of shared memory a block: this GPU, of compute "
              "capability 8.9, has 101376");
  }
}

}  // namespace
}  // namespace shunt::cuda_engine
#endif
