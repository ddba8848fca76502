// Checks that what is written lies apart: from itself, and from what is read meanwhile.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>

#include "shunt/context.hpp"
#include "shunt/format.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Whether two views share a byte, whatever their strides: columns of one matrix lie apart. Of
// elements of less than a byte in no dense rows nothing is said: false.
bool overlap(const Tensor& a, const Tensor& b);
// Throws Error{invalid_argument} where they do. `name`: "gather: rows"; `other`: "hidden".
void check_apart(std::string_view name, const Tensor& tensor, std::string_view other,
                 const Tensor& from);
// The same, but that they may be the same view.
void check_same_or_apart(std::string_view name, const Tensor& tensor, std::string_view other,
                         const Tensor& from);
// Of a call with many: what is written lies apart from what is read and from each other. Tensors
// may be absent. `what`: "route".
struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};
using NamedTensors = std::span<const NamedTensor>;
void check_all_apart(std::string_view what, NamedTensors written, NamedTensors read);
inline void check_all_apart(std::string_view what, std::initializer_list<NamedTensor> written,
                            std::initializer_list<NamedTensor> read) {
  check_all_apart(what, NamedTensors(written.begin(), written.size()),
                  NamedTensors(read.begin(), read.size()));
}
// check_workspace(), and throws where its `needed` bytes are any of the operands'.
void check_workspace_apart(std::string_view what, Workspace workspace, std::size_t needed,
                           Device device, NamedTensors written, NamedTensors read);
inline void check_workspace_apart(std::string_view what, Workspace workspace, std::size_t needed,
                                  Device device, std::initializer_list<NamedTensor> operands) {
  check_workspace_apart(what, workspace, needed, device,
                        NamedTensors(operands.begin(), operands.size()), {});
}
// Memory as a view, to be one of these.
inline Tensor bytes_at(const void* data, std::size_t bytes, Device device) {
  return view(data, DType::u8, {static_cast<std::int64_t>(bytes)}, device);
}
// What is written lies apart from every part of a packed matrix, which is read.
void check_apart_from(std::string_view what, const NamedTensor& written,
                      const PackedMatrix& matrix);
// Throws unless a vector's or matrix's strides keep its elements apart, either way round,
// transposed or not. `name`: "unpack: out".
void check_elements_apart(std::string_view name, const Tensor& tensor);

}  // namespace shunt
