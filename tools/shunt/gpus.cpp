#include "gpus.hpp"

#include "cuda/devices.hpp"

namespace shunt::tool {

Gpus list_gpus() {
  const cuda_engine::DeviceList found = cuda_engine::list_devices();
  Gpus gpus;
  gpus.reason = found.reason;
  for (const auto& device : found.devices) {
    gpus.list.push_back(
        {device.name,
         std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor),
         device.multiprocessors, device.memory_bytes});
  }
  return gpus;
}

}  // namespace shunt::tool
