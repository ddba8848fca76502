#include "cuda/runtime.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/current.hpp"
#include "cuda/launch.hpp"

namespace shunt::cuda_engine {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here; the next call must not see it
  const Status status =
      error == cudaErrorMemoryAllocation ? Status::out_of_memory : Status::internal;
  throw Error(status, std::string(what) + ": " + cudaGetErrorString(error));
}

namespace {
std::string capability(const Gpu& gpu) {
  return std::to_string(gpu.compute / 10) + "." + std::to_string(gpu.compute % 10);
}
}  // namespace

int make_current(int index) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  if (before != index) check(cudaSetDevice(index), "cudaSetDevice");
  return before;
}

void restore_current(int before) noexcept {
  int now = 0;
  if (cudaGetDevice(&now) == cudaSuccess && now != before && cudaSetDevice(before) != cudaSuccess) {
    cudaGetLastError();
  }
}

void check_fits(const char* what, const Gpu& gpu, std::size_t bytes) {
  if (bytes <= static_cast<std::size_t>(gpu.shared_bytes)) return;
  throw Error(Status::unsupported,
              std::string(what) + ": needs " + std::to_string(bytes) +
                  " bytes of shared memory a block: this GPU, of compute capability " +
                  capability(gpu) + ", has " + std::to_string(gpu.shared_bytes));
}

namespace {

// Bytes of shared memory that a kernel's own arrays take.
std::size_t static_shared(const void* kernel, int index) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> known;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({kernel, index});
  if (is_new) {
    cudaFuncAttributes attributes{};
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        error != cudaSuccess) {
      known.erase(at);
      check(error, "cudaFuncGetAttributes");
    }
    at->second = attributes.sharedSizeBytes;
  }
  return at->second;
}

}  // namespace

void allow_shared(const char* what, const Gpu& gpu, const void* kernel, std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t own = static_shared(kernel, gpu.index);
  check_fits(what, gpu, own + bytes);
  if (own + bytes <= std::size_t{48} * 1024) return;
  // The most, whatever is asked for now: another thread may launch the same kernel with more.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             gpu.shared_bytes - static_cast<int>(own)),
        "cudaFuncSetAttribute");
}

namespace {

// Compiled for the architectures that every kernel here is compiled for.
__global__ void probe_kernel() {}

int clusters_at_once(const Gpu& gpu, int size) {
  const Current current(gpu.index);
  check(cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             gpu.shared_bytes),
        "cudaFuncSetAttribute");
  if (size > 8) {
    check(cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(size);
  config.blockDim = 32;
  config.dynamicSmemBytes = static_cast<std::size_t>(gpu.shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, probe_kernel, &config),
        "cudaOccupancyMaxActiveClusters");
  return count;
}
}  // namespace

int compute_capability(int index) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess) {
    cudaGetLastError();  // the next call must not see it
    return 0;
  }
  return 10 * major + minor;
}

int multiprocessors(int index) {
  int count = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

namespace {
// The environment variable SHUNT_CUDA_SHARED_BYTES: no block asks for more than so much, so that
// plans and kernels for GPUs with less can be tried on one with more (101376: 8.6, 8.9 and 12.0).
int most_shared_bytes() {
  static const int most = [] {
    constexpr int least = 99 * 1024;
    const char* const wanted = std::getenv("SHUNT_CUDA_SHARED_BYTES");
    if (wanted == nullptr || *wanted == '\0') return std::numeric_limits<int>::max();
    int value = 0;
    const char* const end = wanted + std::strlen(wanted);
    const auto [stop, error] = std::from_chars(wanted, end, value);
    if (error != std::errc() || stop != end || value < least) {
      throw Error(Status::invalid_argument, std::string("SHUNT_CUDA_SHARED_BYTES is '") + wanted +
                                                "': must be " + std::to_string(least) +
                                                " or more, or not set");
    }
    return value;
  }();
  return most;
}
}  // namespace

int block_shared_bytes(int index) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index) !=
      cudaSuccess) {
    cudaGetLastError();  // the next call must not see it
    return 0;
  }
  return std::min(bytes, most_shared_bytes());
}

Gpu open(void* stream, int index, bool dependent_launch) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    cudaGetLastError();
    throw Error(Status::unsupported,
                std::string("cuda: no GPU is there (") +
                    (error != cudaSuccess ? cudaGetErrorString(error) : "none is visible") +
                    "); the CPU engine is shunt::cpu()");
  }
  if (index < 0 || index >= count) {
    throw Error(Status::unsupported, "cuda: index is " + std::to_string(index) + ": must be 0 to " +
                                         std::to_string(count - 1));
  }
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    return value;
  };
  Gpu gpu{.index = index, .stream = stream, .dependent_launch = dependent_launch};
  gpu.compute = compute_capability(index);
  if (gpu.compute < 80) {
    throw Error(Status::unsupported, "cuda: GPU " + std::to_string(index) +
                                         " has compute capability " + capability(gpu) +
                                         ": must be 8.0 or newer");
  }
  {
    const Current current(index);
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      throw Error(Status::unsupported,
                  "cuda: this build of Shunt has no code for compute capability " +
                      capability(gpu) + ", that of GPU " + std::to_string(index) +
                      ": build it with that among CMAKE_CUDA_ARCHITECTURES");
    }
    check(error, "cudaFuncGetAttributes");
    // Code of an older GPU that the driver has translated for this one knows no clusters and waits
    // for no predecessor: the plans are those of the oldest.
    if (attributes.ptxVersion < gpu.compute) gpu.compute = 80;
  }
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  gpu.shared_bytes =
      std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), most_shared_bytes());
  // Kilohertz, twice a clock.
  gpu.read_gbps =
      2e-6 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  gpu.clock_ghz = 1e-6 * attribute(cudaDevAttrClockRate);
  gpu.l2_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  if (gpu.compute >= 90 && attribute(cudaDevAttrClusterLaunch) != 0) gpu.largest_cluster = 8;
  gpu.clusters[1] = gpu.multiprocessors;
  for (int size = 2; size <= gpu.largest_cluster; ++size) {
    gpu.clusters[static_cast<std::size_t>(size)] = clusters_at_once(gpu, size);
  }
  // A part of a GPU (MIG) may lack groups of 16 multiprocessors, or of 8.
  while (gpu.clusters[static_cast<std::size_t>(gpu.largest_cluster)] == 0) gpu.largest_cluster /= 2;
  gpu.widest_cluster = gpu.largest_cluster;
  if (gpu.compute == 90 && gpu.multiprocessors >= 100 && clusters_at_once(gpu, 16) > 0) {
    gpu.widest_cluster = 16;
  }
  gpu.tickets = static_cast<std::uint32_t*>(allocate(gpu, ticket_count * sizeof(std::uint32_t)));
  return gpu;
}

void close(const Gpu& gpu) noexcept {
  if (gpu.tickets != nullptr) release(gpu.index, gpu.tickets);
}

void* allocate(const Gpu& gpu, std::size_t bytes) {
  const Current current(gpu.index);
  void* data = nullptr;
  const std::string what = "allocate: " + std::to_string(bytes) + " bytes on GPU " +
                           std::to_string(gpu.index) + " cannot be had";
  check(cudaMalloc(&data, bytes), what.c_str());
  if (const cudaError_t error = cudaMemset(data, 0, bytes); error != cudaSuccess) {
    cudaFree(data);
    check(error, "cudaMemset");
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return data;
}

void release(int index, void* data) noexcept {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return;  // the process is ending
  if (before != index) cudaSetDevice(index);
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();  // not for the next call to see
  restore_current(before);
}

void copy(const Gpu& gpu, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const Current current(gpu.index);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(gpu)), "copy");
  check(cudaStreamSynchronize(stream_of(gpu)), "copy");
}

void synchronize(const Gpu& gpu) {
  const Current current(gpu.index);  // the default streams are the current GPU's
  check(cudaStreamSynchronize(stream_of(gpu)), "synchronize");
}

}  // namespace shunt::cuda_engine
