#include "layer/stage_clock.hpp"

#include <utility>

#include "cuda/marks.hpp"

namespace shunt {

StageClock::StageClock(const Context& context, std::vector<StageTime>* times) : times_(times) {
  if (times_ == nullptr) return;
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      marks_ = std::make_shared<cuda_engine::Marks>(context.gpu());
    }
  }
  mark();
}

void StageClock::mark() {
  if constexpr (cuda_engine::built) {
    if (marks_ != nullptr) return marks_->mark();
  }
  moments_.push_back(std::chrono::steady_clock::now());
}

void StageClock::ended(const char* stage, std::function<StageCost()> cost) {
  mark();
  stages_.push_back({stage, std::move(cost)});
}

void StageClock::finish() {
  if (times_ == nullptr) return;
  std::vector<double> seconds;
  if constexpr (cuda_engine::built) {
    if (marks_ != nullptr) seconds = marks_->seconds();
  }
  for (std::size_t i = 1; i < moments_.size(); ++i) {
    seconds.push_back(std::chrono::duration<double>(moments_[i] - moments_[i - 1]).count());
  }
  for (std::size_t i = 0; i < stages_.size(); ++i) {
    const StageCost least = stages_[i].cost();
    times_->push_back({stages_[i].name, seconds[i], least.bytes, least.flops});
  }
}

}  // namespace shunt
