#include "shunt/context.hpp"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "cpu/pool.hpp"
#include "cuda/runtime.hpp"

namespace shunt {

void Buffer::release() {
  if (data_ != nullptr && device_.type == DeviceType::cuda) {
    cuda_engine::release(device_.index, data_);
  } else {
    std::free(data_);
  }
}

Buffer::~Buffer() { release(); }

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    device_ = other.device_;
  }
  return *this;
}

struct Context::Impl {
  Impl(Device where, int threads) : device(where), pool(threads) {}
  ~Impl() { cuda_engine::close(gpu); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  Device device;
  cpu_engine::Pool pool;  // of the caller alone on CUDA, for what a host does at set-up
  cuda_engine::Gpu gpu{};
};

namespace {

template <class Impl>
Impl& there(const std::shared_ptr<Impl>& impl) {
  return held(impl, "context", "cpu() or cuda()");
}

}  // namespace

Device Context::device() const { return there(impl_).device; }
int Context::threads() const { return there(impl_).pool.threads(); }
cpu_engine::Pool& Context::pool() const { return there(impl_).pool; }
const cuda_engine::Gpu& Context::gpu() const { return there(impl_).gpu; }

void Context::synchronize() const {
  if (there(impl_).device.type == DeviceType::cuda) cuda_engine::synchronize(impl_->gpu);
}

void Context::copy(void* to, const void* from, std::size_t bytes) const {
  if (bytes > 0 && (to == nullptr || from == nullptr)) {
    fail(Status::invalid_argument, "context: copy of {} bytes: {} is null", bytes,
         to == nullptr ? "to" : "from");
  }
  if (there(impl_).device.type == DeviceType::cuda) {
    cuda_engine::copy(impl_->gpu, to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

Buffer Context::allocate(std::size_t bytes) const {
  Buffer buffer;
  if (bytes == 0) return buffer;
  if (there(impl_).device.type == DeviceType::cuda) {
    buffer.data_ = cuda_engine::allocate(impl_->gpu, bytes);
    buffer.bytes_ = bytes;
    buffer.device_ = impl_->device;
    return buffer;
  }
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

Context cuda(CudaOptions options) {
  Context context;
  context.impl_ = std::make_shared<Context::Impl>(Device{DeviceType::cuda, options.index}, 1);
  context.impl_->gpu = cuda_engine::open(options.stream, options.index, options.dependent_launch);
  return context;
}

Context cuda(void* stream, int index) { return cuda({.stream = stream, .index = index}); }

namespace cuda_engine {

const Gpu& gpu(const Context& context) { return context.gpu(); }

Support supported_device(const char* what, Device device) {
  if (device.type == DeviceType::cpu) return {};
  if (device.type != DeviceType::cuda) {
    return refuse("{}: the device is of type {}: must be 0 (cpu) or 1 (cuda)", what,
                  static_cast<int>(device.type));
  }
  if (!built) return refuse("{}: this build has no CUDA engine (SHUNT_CUDA=ON builds it in)", what);
  return {};
}

}  // namespace cuda_engine

}  // namespace shunt
