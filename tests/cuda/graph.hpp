// A stream of its own, and CUDA graphs captured from it. For tests, only where CUDA is built in
// (SHUNT_CUDA_BUILT).
#pragma once

#include <functional>

namespace shunt::test {

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }  // a cudaStream_t

 private:
  void* stream_ = nullptr;
};

// What `enqueue` puts on the stream, to be launched again and again. Fails the test where enqueue
// does what a graph cannot hold: an allocation, a wait, a copy from the host's memory.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() const;  // and waits

 private:
  void* stream_ = nullptr;
  void* graph_ = nullptr;  // a cudaGraphExec_t
};

}  // namespace shunt::test
