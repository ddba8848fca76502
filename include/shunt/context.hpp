// Where operations run: the threads of a CPU, or a stream of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shunt/tensor.hpp"

namespace shunt {

// Scratch memory that the caller lends for one call. Any contents; 64-byte aligned (CPU) or
// 256-byte aligned (CUDA), apart from all that the call reads and writes. An operation asks for it
// by its *_workspace_bytes function.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Memory owned by the caller, freed by the destructor. Move only. 64-byte aligned (CPU) or 256-byte
// aligned (CUDA).
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  operator Workspace() const { return {data_, bytes_}; }

 private:
  friend class Context;
  void release();
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_{};
};

struct CpuOptions {
  int threads = 0;  // worker threads, the caller included; 0: every core this process may use
};

struct CudaOptions {
  void* stream = nullptr;  // a cudaStream_t; nullptr: the default stream
  int index = 0;           // of the GPU
  // Programmatic dependent launch: the kernels of one operation after another may start before
  // their predecessor has ended, and wait for its results themselves. What else runs on the stream
  // need not take part. Only Hopper and newer; elsewhere it changes nothing.
  bool dependent_launch = false;
};

namespace cpu_engine {
class Pool;
}
namespace cuda_engine {
struct Gpu;
}

// A device and what orders work on it. Copies share the same threads or stream. One Context is for
// one calling thread at a time; two Contexts are independent. Of a GPU's more at the end.
class Context {
 public:
  Device device() const;
  // Threads of the CPU engine, the caller included; 1 on CUDA.
  int threads() const;
  // Memory on this device, zeroed. Throws Error{out_of_memory}. Never called by an operation.
  Buffer allocate(std::size_t bytes) const;
  // Waits for everything enqueued. A CPU call has always finished when it returns.
  void synchronize() const;
  // Copies on this device or from or to the host, in the stream's order, and waits: for set-up.
  void copy(void* to, const void* from, std::size_t bytes) const;

  cpu_engine::Pool& pool() const;       // for the CPU engine's own use
  const cuda_engine::Gpu& gpu() const;  // for the CUDA engine's own use

 private:
  friend Context cpu(CpuOptions);
  friend Context cuda(CudaOptions);
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The CPU engine. Its instruction set is the best that the CPU reports (the environment variable
// SHUNT_ISA names a lesser one), and what it is tuned for goes by the CPU's family
// (SHUNT_CPU_TUNING: common or zen5), never by the outcome of a timing. Throws Error when threads <
// 0 or > 1024, or when one of these names none.
Context cpu(CpuOptions options = {});

// The CUDA engine: calls are enqueued on the stream, in order, and return. Nothing on it is
// looked at by the host: values that only the device knows (ids out of range, a permutation) are
// the caller's to keep legal, where an operation does not say otherwise. Throws Error{unsupported}
// when the library was built without CUDA, no such GPU is there, or it is older than compute
// capability 8.0.
Context cuda(CudaOptions options);
Context cuda(void* stream = nullptr, int index = 0);

}  // namespace shunt

// What a context of a GPU asks of its caller:
// - One kernel after the other: they share counters. So it is on its stream. Replay graphs captured
//   from one context on one stream, or with an event between them: two at once would give wrong
//   sums or wait for each other for ever. For work side by side make two contexts, each with a
//   stream of its own.
// - The stream outlives the context and all that is made with it: buffers, layers, captured graphs.
// Operations may be called whichever GPU is the calling thread's current one, and leave it so.
