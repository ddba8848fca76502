// Runs stages one after the other, timing each when asked.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layer/plan.hpp"

namespace shunt {

namespace cuda_engine {
class Marks;
}

// On a GPU stages are only enqueued between marks, and the times are known at the end.
class StageClock {
 public:
  // `times` null: nothing is timed, and nothing allocated.
  StageClock(const Context& context, std::vector<StageTime>* times);

  // `cost` is asked for by finish().
  template <class Run, class Cost>
  void operator()(const char* stage, const Run& run, const Cost& cost) {
    run();
    if (times_ != nullptr) ended(stage, cost);
  }
  // Writes a row a stage. Waits on a GPU.
  void finish();

 private:
  void ended(const char* stage, std::function<StageCost()> cost);
  void mark();

  struct Stage {
    std::string name;
    std::function<StageCost()> cost;
  };
  std::vector<StageTime>* times_;
  std::vector<Stage> stages_;
  std::vector<std::chrono::steady_clock::time_point> moments_;
  std::shared_ptr<cuda_engine::Marks> marks_;
};

}  // namespace shunt
