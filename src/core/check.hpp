// Checks of arguments, with messages that name the argument, its value and what is legal.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

template <class... Args>
[[noreturn]] void fail(Status status, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(status, fmt::format(format, std::forward<Args>(args)...));
}

// What a handle refers to, unless it was made by nobody or has been moved from. `from`: what it
// must come from.
template <class Pointer>
auto& held(const Pointer& pointer, std::string_view what, std::string_view from) {
  if (pointer == nullptr) {
    fail(Status::invalid_argument, "{}: is empty: must come from {}", what, from);
  }
  return *pointer;
}

// Support{no} with a formatted reason.
template <class... Args>
Support refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Support::no(fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error{invalid_argument} with the reason when a spec is not `legal` on any engine.
void require_legal(const Support& legal, std::string_view what);
// Throws Error{unsupported} with the reason when `support` is a no. `what`: "route".
void require(const Support& support, std::string_view what);

inline constexpr std::int64_t any_size = -1;

struct TensorRule {
  std::initializer_list<DType> dtypes;
  std::initializer_list<std::int64_t> shape;  // any_size leaves a dimension free
  bool dense = false;                         // row-major without gaps
  bool rows_dense = false;                    // the last stride is 1, others are free
  bool written = false;                       // rows (the last two dimensions) lie apart, in order
};
inline constexpr std::initializer_list<DType> float_dtypes = {DType::f32, DType::bf16, DType::f16};

// Throws Error{invalid_argument} unless `tensor` is given, of one of the dtypes, of the shape, laid
// out as asked, on `device`, and has data (when it has elements). `name`: "route: logits".
void check_tensor(std::string_view name, const Tensor& tensor, const TensorRule& rule,
                  Device device);
// Throws unless the tensor is given exactly when `wanted`; `why` says what decides it. Returns
// wanted.
bool check_given(std::string_view name, const Tensor& tensor, bool wanted, std::string_view why);
// Throws unless the workspace has `needed` bytes, 64-byte aligned.
void check_workspace(std::string_view what, Workspace workspace, std::size_t needed);

// a * b, or Error{invalid_argument} on overflow of 64 bits; both >= 0.
std::int64_t checked_product(std::string_view what, std::int64_t a, std::int64_t b);

}  // namespace shunt
