#include "checkpoint/repacking.hpp"

#include "cpu/float_mode.hpp"
#include "cpu/free_threads.hpp"

namespace shunt {

void* Repacking::take(std::size_t bytes) {
  if (!memory_) memory_ = std::make_shared<std::vector<std::unique_ptr<std::byte[]>>>();
  memory_->push_back(std::make_unique_for_overwrite<std::byte[]>(bytes + 64));
  bytes_ += static_cast<std::int64_t>(bytes);
  std::byte* const data = memory_->back().get();
  return data + (64 - reinterpret_cast<std::uintptr_t>(data) % 64) % 64;
}

std::shared_ptr<const void> Repacking::finish(bool fill) {
  const cpu_engine::FloatMode mode;
  if (fill) {
    cpu_engine::on_free_cores(static_cast<std::int64_t>(work_.size()), bytes_,
                              [&](std::int64_t i) { work_[static_cast<std::size_t>(i)](); });
  }
  work_.clear();
  bytes_ = 0;
  return std::exchange(memory_, nullptr);
}

}  // namespace shunt
