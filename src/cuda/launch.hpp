// Launching kernels: on the context's stream, in clusters, and with programmatic dependent launch
// where the context asks for it. For .cu files.
//
// Programmatic dependent launch: a kernel that is launched with it may start while its predecessor
// still runs. Every kernel of the engine therefore begins its work with wait_for_predecessor(),
// before it reads or writes memory that another kernel touches (weights that never change may be
// read earlier), and calls let_successor_start() as early as it likes: the successor's own wait
// returns only when this grid has ended and its writes are seen. All threads of a kernel wait, or
// a successor of the successor could overtake. A predecessor that takes no part counts as one that
// lets go at its end, so nothing hangs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "cuda/runtime.hpp"

namespace shunt::cuda_engine {

// Throws Error{out_of_memory | internal} unless cudaSuccess.
void check(cudaError_t error, const char* what);

inline cudaStream_t stream_of(const Gpu& gpu) { return static_cast<cudaStream_t>(gpu.stream); }

struct Shape {
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  std::size_t shared = 0;  // dynamic bytes
  unsigned cluster = 1;    // blocks along x that form a cluster; must divide grid.x
};

// Throws Error{unsupported} where a block of this GPU has less shared memory than `bytes`: shapes
// are made for Hopper.
void check_fits(const char* what, const Gpu& gpu, std::size_t bytes);
// Lets `kernel` ask for `bytes` of dynamic shared memory beside its own arrays, if both fit. Cheap:
// called before each launch.
void allow_shared(const char* what, const Gpu& gpu, const void* kernel, std::size_t bytes);

// Enqueues kernel<<<shape>>>(arguments...). `what` names the operation in an error.
template <class... Parameters, class... Arguments>
void launch(const char* what, const Gpu& gpu, const Shape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  allow_shared(what, gpu, reinterpret_cast<const void*>(kernel), shape.shared);
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (gpu.dependent_launch && gpu.compute >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream_of(gpu);
  config.attrs = attributes;
  config.numAttrs = count;
  if (shape.cluster > 8) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
  }
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace shunt::cuda_engine
