// Moments on a stream, and the time between them.
#pragma once

#include <memory>
#include <vector>

#include "cuda/runtime.hpp"

namespace shunt::cuda_engine {

class Marks {
 public:
  // Holds the stream for half a millisecond first, so that what is enqueued meanwhile runs without
  // waiting for the host in between.
  explicit Marks(const Gpu& gpu);
  ~Marks();
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  void mark();
  // From each mark to the next. Waits for the last.
  std::vector<double> seconds() const;

 private:
  const Gpu gpu_;
  std::vector<void*> events_;
};

}  // namespace shunt::cuda_engine
