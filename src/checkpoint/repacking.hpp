#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace shunt {

// Memory for what a dialect does not store as a PackedMatrix wants it, and the work of filling it:
// all at once, on all cores, when everything has been checked.
class Repacking {
 public:
  void* take(std::size_t bytes);
  void later(std::function<void()> work) { work_.push_back(std::move(work)); }
  // Does it, or nothing of it. The memory; null when none was taken.
  std::shared_ptr<const void> finish(bool fill);

 private:
  std::int64_t bytes_ = 0;  // taken
  std::shared_ptr<std::vector<std::unique_ptr<std::byte[]>>> memory_;
  std::vector<std::function<void()>> work_;
};

}  // namespace shunt
