#include "cuda/devices.hpp"

namespace shunt::cuda {

DeviceList list_devices() {
  return {.devices = {}, .reason = "built without CUDA (SHUNT_CUDA=ON builds it in)"};
}

}  // namespace shunt::cuda
