// Timing on a GPU: many calls captured in one CUDA graph, the graph replayed. For host files; built
// with or without CUDA.
#pragma once

#include <cstdint>
#include <functional>

#include "shunt/context.hpp"

namespace shunt::cuda_engine {

// A stream of its own: the default stream cannot be captured. It outlives the contexts on it.
class Stream {
 public:
  explicit Stream(int index = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }

 private:
  void* stream_ = nullptr;
};

struct GraphOptions {
  // enqueue(0) .. enqueue(rotations - 1) differ in what they read and write; all of them are in the
  // graph, in turn, as often as it takes for `calls`.
  std::int64_t rotations = 1;
  std::int64_t calls = 64;
  double seconds = 0.06;  // of measuring, about
  int least_samples = 9;
};

// Microseconds a call.
struct GraphTimes {
  double us = 0;  // median
  double us_min = 0, us_max = 0;
  std::int64_t calls = 0;  // in the graph
  int samples = 0;
};

// `enqueue` enqueues one call on the context's stream, which is not the default one. It runs once
// outside the graph first, then is captured. A sample is several replays between two events.
GraphTimes time_in_graph(const Context& context, const std::function<void(std::int64_t)>& enqueue,
                         const GraphOptions& options);

// Normal deviates with the standard deviation given, from a counter: the same seed gives the same
// values. f32, bf16 or f16 on the context's GPU; enqueued.
void fill_normal(const Context& context, Tensor out, float deviation, std::uint64_t seed);

}  // namespace shunt::cuda_engine
