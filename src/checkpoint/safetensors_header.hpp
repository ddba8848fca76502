// The header of a safetensors file, checked.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shunt/tensor.hpp"

namespace shunt {

inline constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit

struct TensorEntry {
  DType dtype{};
  std::vector<std::int64_t> shape;  // any rank; what a Tensor cannot hold is refused when asked for
  std::uint64_t begin = 0, end = 0;  // bytes in the file
};

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// The dtype's name in the format: "BF16". Null for a name that the format does not have.
const DType* dtype_by_name(std::string_view name);
std::string_view name_of_dtype(DType dtype);

// Checks everything about `size` bytes at `data`, the whole file, but the tensors' values. Throws
// Error{bad_file} that begins with `path`. What it accepts has every tensor inside the file, none
// overlapping, no byte left over. Tensors need not be aligned: not all writers fill the header up.
SafetensorsHeader read_safetensors_header(const std::string& path, const unsigned char* data,
                                          std::uint64_t size);

struct WrittenTensor {
  std::string_view name;
  DType dtype{};
  std::span<const std::int64_t> shape;
  std::int64_t bytes = 0;
};

// The header of a file in which these lie one behind the other, without its length; filled up with
// spaces so that tensors begin at a multiple of 8.
std::string write_safetensors_header(const std::vector<WrittenTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata);

}  // namespace shunt
