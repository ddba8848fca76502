// The build without CUDA: there is no GPU, and it says so.
#include "cuda/ceilings.hpp"
#include "cuda/devices.hpp"
#include "cuda/runtime.hpp"
#include "cuda/timing.hpp"

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

int compute_capability(int) { return 0; }
Gpu open(void*, int, bool) { absent(); }
void close(const Gpu&) noexcept {}
void* allocate(const Gpu&, std::size_t) { absent(); }
void release(int, void*) noexcept {}
void copy(const Gpu&, void*, const void*, std::size_t) { absent(); }
void synchronize(const Gpu&) { absent(); }

Stream::Stream(int) { absent(); }
Stream::~Stream() { stream_ = nullptr; }  // there never was one
GraphTimes time_in_graph(const Context&, const std::function<void(std::int64_t)>&,
                         const GraphOptions&) {
  absent();
}
void fill_normal(const Context&, Tensor, float, std::uint64_t) { absent(); }
double Ceilings::Mix::rate() const { absent(); }
double Ceilings::floor_us(double, double, double) const { absent(); }
Ceilings measure_ceilings(const Context&) { absent(); }

}  // namespace shunt::cuda_engine
