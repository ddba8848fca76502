// A matrix of more than 2^31 numbers of which only some rows' are ever touched, so that offsets are
// past what 32 bits number while little memory is in use.
#pragma once

#include <sys/mman.h>

#include <new>

#include "engine.hpp"

namespace shunt::test {

class FarRows {
 public:
  // Throws std::bad_alloc where there is no room: addresses on the CPU, memory on a GPU.
  FarRows(const Context& context, DType dtype, std::int64_t rows, std::int64_t columns,
          std::int64_t stride)
      : context_(context), size_(bits(dtype) / 8), stride_(stride), columns_(columns) {
    bytes_ = static_cast<std::size_t>(((rows - 1) * stride + columns) * size_);
    void* data = nullptr;
    if (context.device().type == DeviceType::cpu) {
      data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) throw std::bad_alloc();
      mapped_ = data;
    } else {
      buffer_ = context.allocate(bytes_);
      data = buffer_.data();
    }
    tensor_ = view(data, dtype, {rows, columns}, context.device());
    tensor_.strides[0] = stride;
  }
  ~FarRows() {
    if (mapped_ != nullptr) munmap(mapped_, bytes_);
  }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  const Tensor& tensor() const { return tensor_; }
  // All rows at once, from a dense matrix on the host, or to one.
  void put(const void* dense) {
    for (std::int64_t r = 0; r < tensor_.shape[0]; ++r) {
      context_.copy(row(r), static_cast<const char*>(dense) + r * row_bytes(), bytes_of_row());
    }
  }
  void get(void* dense) const {
    context_.synchronize();
    for (std::int64_t r = 0; r < tensor_.shape[0]; ++r) {
      context_.copy(static_cast<char*>(dense) + r * row_bytes(), row(r), bytes_of_row());
    }
  }

 private:
  char* row(std::int64_t r) const { return tensor_.as<char>() + r * stride_ * size_; }
  std::int64_t row_bytes() const { return columns_ * size_; }
  std::size_t bytes_of_row() const { return static_cast<std::size_t>(row_bytes()); }

  Context context_;
  std::int64_t size_, stride_, columns_;
  std::size_t bytes_ = 0;
  void* mapped_ = nullptr;
  Buffer buffer_;
  Tensor tensor_;
};

}  // namespace shunt::test
