// Which part of a multiprocessor's memory is shared memory, and which the L1 cache. For .cu files.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/launch.hpp"

namespace shunt::cuda_engine {

// For small kernels between such as want much shared memory: a multiprocessor that must change its
// parts waits until it is empty, and blocks that start ahead could not. Cheap: called before each
// launch.
template <class Kernel>
void prefer_shared_memory(Kernel* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
}

}  // namespace shunt::cuda_engine
