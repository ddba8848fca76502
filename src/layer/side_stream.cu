#include "layer/side_stream.hpp"

#include "cuda/current.hpp"
#include "cuda/launch.hpp"

namespace shunt {

namespace {

using cuda_engine::check;
using cuda_engine::Current;

cudaStream_t stream(void* of) { return static_cast<cudaStream_t>(of); }
cudaEvent_t event(void* of) { return static_cast<cudaEvent_t>(of); }

}  // namespace

SideStream::SideStream(const Context& main)
    : index_(main.device().index), main_(main.gpu().stream) {
  const Current current(index_);
  cudaStream_t made = nullptr;
  cudaEvent_t forked = nullptr, ended = nullptr;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = made;
  check(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming), "cudaEventCreate");
  forked_ = forked;
  ended_ = ended;
  side_ = cuda({.stream = stream_, .index = index_});
  joined_ = cuda({.stream = main_, .index = index_});
}

SideStream::~SideStream() {
  // What is still enqueued ends first: the events and the stream are given back after that.
  const cudaError_t given_back[] = {cudaEventDestroy(event(forked_)),
                                    cudaEventDestroy(event(ended_)),
                                    cudaStreamDestroy(stream(stream_))};
  for (const cudaError_t error : given_back) {
    if (error != cudaSuccess) cudaGetLastError();  // not for the next call to see
  }
}

void SideStream::fork() const {
  check(cudaEventRecord(event(forked_), stream(main_)), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream(stream_), event(forked_), 0), "cudaStreamWaitEvent");
}

void SideStream::abandon() const noexcept {
  if (cudaEventRecord(event(ended_), stream(stream_)) != cudaSuccess ||
      cudaStreamWaitEvent(stream(main_), event(ended_), 0) != cudaSuccess) {
    cudaGetLastError();  // not for the next call to see
  }
}

void SideStream::join() const {
  check(cudaEventRecord(event(ended_), stream(stream_)), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream(main_), event(ended_), 0), "cudaStreamWaitEvent");
}

}  // namespace shunt
