#include "cuda/devices.hpp"

#include <gtest/gtest.h>

namespace {

// Holds on every machine, with and without CUDA, driver or GPU: an answer, never a crash.
TEST(Devices, EitherDevicesOrAReason) {
  const shunt::cuda_engine::DeviceList list = shunt::cuda_engine::list_devices();
  EXPECT_EQ(list.devices.empty(), !list.reason.empty());
  for (const auto& device : list.devices) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GT(device.compute_major, 0);
    EXPECT_GT(device.multiprocessors, 0);
    EXPECT_GT(device.memory_bytes, 0U);
  }
}

TEST(Devices, AskingTwiceGivesTheSame) {
  const auto first = shunt::cuda_engine::list_devices();
  const auto second = shunt::cuda_engine::list_devices();
  EXPECT_EQ(first.devices.size(), second.devices.size());
  EXPECT_EQ(first.reason, second.reason);
}

}  // namespace
