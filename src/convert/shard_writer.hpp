// A safetensors file whose tensors are known beforehand and come in any order, a piece at a time.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shunt/tensor.hpp"

namespace shunt {

struct PlannedTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::int64_t bytes() const;
};

using ShardMetadata = std::map<std::string, std::string>;

class ShardWriter {
 public:
  // Begins the file anew. Tensors lie in it as the format's own writer orders them: by width of
  // their elements, then by name. Throws Error{io}.
  ShardWriter(std::string path, std::vector<PlannedTensor> tensors,
              const ShardMetadata& metadata = {{"format", "pt"}});
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // `size` bytes of a tensor, from its byte `offset` on.
  void write(const std::string& name, const void* data, std::size_t size, std::size_t offset = 0);
  // Throws Error{internal} when a tensor lacks bytes; waits until all is on disk.
  void finish();
  std::int64_t file_bytes() const { return file_bytes_; }

  // What the file will take, header and all.
  static std::int64_t planned_bytes(const std::vector<PlannedTensor>& tensors,
                                    const ShardMetadata& metadata = {{"format", "pt"}});

 private:
  struct Place {
    std::int64_t begin = 0, size = 0, written = 0;
  };
  void write_at(const void* data, std::size_t size, std::int64_t at);
  [[noreturn]] void refuse_io(const char* what) const;
  std::string path_;
  int file_ = -1;
  std::int64_t file_bytes_ = 0;
  std::map<std::string, Place> places_;
};

}  // namespace shunt
