#include "shunt/context.hpp"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "cpu/pool.hpp"

namespace shunt {

Buffer::~Buffer() { std::free(data_); }

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    std::free(data_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    device_ = other.device_;
  }
  return *this;
}

struct Context::Impl {
  Impl(Device where, int threads) : device(where), pool(threads) {}
  Device device;
  cpu_engine::Pool pool;
};

Device Context::device() const { return impl_->device; }
int Context::threads() const { return impl_->pool.threads(); }
cpu_engine::Pool& Context::pool() const { return impl_->pool; }
void Context::synchronize() const {}

Buffer Context::allocate(std::size_t bytes) const {
  Buffer buffer;
  if (bytes == 0) return buffer;
  // Large blocks start on a 2 MiB boundary: where the system grants huge pages, reads walk fewer
  // page tables.
  const std::size_t alignment = bytes >= (std::size_t{2} << 20) ? (std::size_t{2} << 20) : 64;
  if (bytes > SIZE_MAX - alignment) {
    fail(Status::out_of_memory, "allocate: {} bytes cannot be had", bytes);
  }
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  buffer.data_ = std::aligned_alloc(alignment, rounded);
  if (buffer.data_ == nullptr)
    fail(Status::out_of_memory, "allocate: {} bytes cannot be had", bytes);
  advise_huge_pages(buffer.data_, rounded);
  // Touched by the threads that will use it, so that pages lie near them.
  auto* data = static_cast<char*>(buffer.data_);
  impl_->pool.run([&](int thread) {
    const auto [begin, end] =
        cpu_engine::share(static_cast<std::int64_t>(rounded), thread, impl_->pool.threads(), 4096);
    std::memset(data + begin, 0, static_cast<std::size_t>(end - begin));
  });
  buffer.bytes_ = bytes;
  buffer.device_ = impl_->device;
  return buffer;
}

Context cpu(CpuOptions options) {
  if (options.threads < 0 || options.threads > 1024) {
    fail(Status::invalid_argument, "CpuOptions.threads is {}: must be 0 (every core) to 1024",
         options.threads);
  }
  const int threads = options.threads > 0 ? options.threads : cpu_engine::available_cores();
  Context context;
  context.impl_ = std::make_shared<Context::Impl>(Device{}, threads);
  return context;
}

Context cuda(void*, int) {
  fail(Status::unsupported,
       "cuda: this build of Shunt has no CUDA engine yet; the CPU engine is shunt::cpu()");
}

}  // namespace shunt
