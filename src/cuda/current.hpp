// A context's GPU as the calling thread's current one.
#pragma once

#include "cpu/float_mode.hpp"
#include "cuda/runtime.hpp"
#include "shunt/context.hpp"

namespace shunt::cuda_engine {

inline bool on_gpu(const Context& context) {
  return built && context.device().type == DeviceType::cuda;
}

// Makes a GPU current. Which one was before: hand it back when the work is enqueued.
int make_current(int index);
void restore_current(int before) noexcept;

// While it lives a GPU is current, without which nothing can be launched on its streams, and the
// thread computes as every other one does.
class Current {
 public:
  explicit Current(int index) {
    if constexpr (built) before_ = make_current(index);
  }
  // Of a context; nothing for a CPU's.
  explicit Current(const Context& context) {
    if constexpr (built) {
      if (on_gpu(context)) before_ = make_current(context.device().index);
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
  cpu_engine::FloatMode mode_;
};

}  // namespace shunt::cuda_engine
