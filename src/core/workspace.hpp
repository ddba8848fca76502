// Arrays carved out of one workspace, 64-byte aligned; carving from nothing measures.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/context.hpp"

namespace shunt {

class Carver {
 public:
  Carver() = default;  // measures: arrays are null
  explicit Carver(Workspace workspace) : base_(static_cast<std::byte*>(workspace.data)) {}

  template <class T>
  T* take(std::int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<std::size_t>(count) * sizeof(T)));
  }
  void* take_bytes(std::size_t bytes) {
    std::byte* const at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return at;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace shunt
