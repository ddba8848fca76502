// Checks that what is written lies apart: from itself, and from what is read meanwhile.
#pragma once

#include <initializer_list>
#include <string_view>

#include "shunt/tensor.hpp"

namespace shunt {

// Whether two views certainly share a byte: dense ones, or those whose rows are dense, a stride of
// any sign apart. Columns of one matrix lie apart. Of other views nothing is said: false.
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
void check_all_apart(std::string_view what, std::initializer_list<NamedTensor> written,
                     std::initializer_list<NamedTensor> read);
// Throws unless a vector's or matrix's strides keep its elements apart, either way round,
// transposed or not. `name`: "unpack: out".
void check_elements_apart(std::string_view name, const Tensor& tensor);

}  // namespace shunt
