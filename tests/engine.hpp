// The engine that a test binary runs its cases on: the CPU's, or with SHUNT_TEST_DEVICE=cuda the
// CUDA engine. The same cases, judged by the same references.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/tensor.hpp"

namespace shunt::test {

inline bool on_gpu() {
  const char* device = std::getenv("SHUNT_TEST_DEVICE");
  return device != nullptr && std::strcmp(device, "cuda") == 0;
}

// `threads` is the CPU engine's.
inline Context engine(int threads = 2) { return on_gpu() ? cuda() : cpu({.threads = threads}); }

// For cases about the host: checks of arguments, threads, instruction sets.
#define SHUNT_ON_CPU_ONLY() \
  if (::shunt::test::on_gpu()) GTEST_SKIP() << "about the CPU engine"

// For cases about the CUDA engine.
#define SHUNT_ON_GPU_ONLY() \
  if (!::shunt::test::on_gpu()) GTEST_SKIP() << "about the CUDA engine"

// Copies of host tensors on a context's device, strides and gaps included; on the CPU the tensors
// themselves. Two views of the same host memory share one copy.
class Mirror {
 public:
  explicit Mirror(const Context& context) : context_(context) {}

  Tensor in(const Tensor& host) { return mirrored(host, false); }
  // Its present contents go there too; fetch() brings it back.
  Tensor out(const Tensor& host) { return mirrored(host, true); }

  // Every byte of the outputs, on either side: NaN in any float, -1 in integers. What a call does
  // not write does not look like what the one before it wrote.
  void poison() {
    for (const Written& range : written_) std::memset(range.host, 0xff, range.bytes);
    for (const Copy& copy : copies_) {
      if (copy.written) context_.copy(copy.device.data(), copy.host, copy.bytes);
    }
  }

  void fetch() {
    context_.synchronize();
    for (const Copy& copy : copies_) {
      if (copy.written) context_.copy(copy.host, copy.device.data(), copy.bytes);
    }
  }

 private:
  struct Copy {
    char* host = nullptr;  // the lowest byte
    std::size_t bytes = 0;
    Buffer device;
    bool written = false;
  };

  Tensor mirrored(const Tensor& host, bool written) {
    const bool here = context_.device().type == DeviceType::cpu;
    Tensor there = host;
    there.device = context_.device();
    if (!host || host.data == nullptr || host.elements() == 0) return here ? host : there;
    std::int64_t low = 0, high = 0;
    for (int d = 0; d < host.rank; ++d) {
      const auto dim = static_cast<std::size_t>(d);
      const std::int64_t reach = (host.shape[dim] - 1) * host.strides[dim];
      (reach < 0 ? low : high) += reach;
    }
    const std::int64_t size = bits(host.dtype) / 8;
    char* const begin = host.as<char>() + low * size;
    const auto bytes = static_cast<std::size_t>((high - low + 1) * size);
    if (written) written_.push_back({begin, bytes});
    if (here) return host;
    Copy* found = nullptr;
    for (Copy& copy : copies_) {
      if (copy.host <= begin && begin + bytes <= copy.host + copy.bytes) found = &copy;
    }
    if (found == nullptr) {
      copies_.push_back({begin, bytes, context_.allocate(bytes), false});
      found = &copies_.back();
      context_.copy(found->device.data(), begin, bytes);
    }
    found->written = found->written || written;
    there.data = static_cast<char*>(found->device.data()) + (host.as<char>() - found->host);
    return there;
  }

  struct Written {
    char* host = nullptr;
    std::size_t bytes = 0;
  };

  Context context_;
  std::vector<Copy> copies_;
  std::vector<Written> written_;
};

}  // namespace shunt::test
