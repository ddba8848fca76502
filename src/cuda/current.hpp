// A context's GPU as the calling thread's current one.
#pragma once

#include "cuda/runtime.hpp"
#include "shunt/context.hpp"

namespace shunt::cuda_engine {

inline bool on_gpu(const Context& context) {
  return built && context.device().type == DeviceType::cuda;
}

// Makes a GPU current. Which one was before: hand it back when the work is enqueued.
int make_current(int index);
void restore_current(int before) noexcept;

// While it lives a context's GPU is current, without which nothing can be launched on its stream.
// Nothing for a CPU.
class Current {
 public:
  explicit Current(const Context& context) {
    if constexpr (built) {
      if (context.device().type == DeviceType::cuda) before_ = make_current(context.device().index);
    }
  }
  ~Current() {
    if constexpr (built) {
      if (before_ >= 0) restore_current(before_);
    }
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = -1;  // -1: nothing to restore
};

}  // namespace shunt::cuda_engine
