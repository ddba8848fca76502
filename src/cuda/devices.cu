#include <cuda_runtime_api.h>

#include "cuda/devices.hpp"

namespace shunt::cuda_engine {

namespace {

std::string version(int number) {  // 13000 -> "13.0"
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

DeviceList list_devices() {
  DeviceList list;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    list.reason = "no GPU";
    if (error != cudaSuccess) {
      list.reason += std::string(" (") + cudaGetErrorString(error) + ")";
      cudaGetLastError();  // the error was reported; the next call must not see it
    }
    return list;
  }
  for (int id = 0; id < count; ++id) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, id) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    list.devices.push_back({.name = properties.name,
                            .compute_major = properties.major,
                            .compute_minor = properties.minor,
                            .multiprocessors = properties.multiProcessorCount,
                            .memory_bytes = properties.totalGlobalMem,
                            .l2_bytes = static_cast<std::size_t>(properties.l2CacheSize)});
  }
  if (list.devices.empty()) {
    list.reason = "no GPU that answers";
    return list;
  }
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess) list.driver = version(driver);
  if (cudaRuntimeGetVersion(&runtime) == cudaSuccess) list.runtime = version(runtime);
  return list;
}

}  // namespace shunt::cuda_engine
