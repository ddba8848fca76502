// Which GPUs this process can see. Built with or without CUDA: without, or without a driver, the
// list is empty and says why.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace shunt::cuda_engine {

struct DeviceInfo {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
};

struct DeviceList {
  std::vector<DeviceInfo> devices;
  std::string reason;               // why the list is empty; empty itself where it is not
  std::string driver{}, runtime{};  // CUDA versions, "13.0"; empty where the list is
};

// Never throws for a missing driver or GPU.
DeviceList list_devices();

}  // namespace shunt::cuda_engine
