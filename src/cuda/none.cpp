// The build without CUDA: there is no GPU, and it says so.
#include "cuda/devices.hpp"
#include "cuda/runtime.hpp"

namespace shunt::cuda_engine {

namespace {
[[noreturn]] void absent() {
  throw Error(Status::unsupported,
              "cuda: this build of Shunt has no CUDA engine (SHUNT_CUDA=ON builds it in); the CPU "
              "engine is shunt::cpu()");
}
}  // namespace

DeviceList list_devices() {
  return {.devices = {}, .reason = "built without CUDA (SHUNT_CUDA=ON builds it in)"};
}

Gpu open(void*, int, bool) { absent(); }
void close(const Gpu&) noexcept {}
void* allocate(const Gpu&, std::size_t) { absent(); }
void release(int, void*) noexcept {}
void copy(const Gpu&, void*, const void*, std::size_t) { absent(); }
void synchronize(const Gpu&) { absent(); }

}  // namespace shunt::cuda_engine
