// What every function of the C ABI begins and ends with: exceptions become a status and a message,
// structs are read by their size, pointers are checked, and messages name function and argument.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "core/check.hpp"
#include "shunt/c/shunt.h"
#include "shunt/shunt.hpp"

namespace shunt::capi {

// The message of this thread's last call that has a status.
void set_last_error(const char* message) noexcept;
// The status of the exception being handled, whose message it records.
shunt_status handle_exception() noexcept;

class Call {
 public:
  explicit Call(const char* function) : function_(function) {}

  template <class... Args>
  [[noreturn]] void wrong(fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(Status::invalid_argument,
                fmt::format("{}: {}", function_, fmt::format(format, std::forward<Args>(args)...)));
  }

  // *pointer, or an error that calls it `name`.
  template <class T>
  T& not_null(const char* name, T* pointer) const {
    if (pointer == nullptr) wrong("{} is NULL", name);
    return *pointer;
  }

  // The caller's struct as this library knows it, completed from `defaults`.
  template <class T>
  T read(const char* name, const T* given, T defaults = {}) const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    static_assert(std::is_same_v<decltype(T::struct_size), std::uint64_t>);
    const std::size_t known = known_size(name, given, sizeof(T));
    std::memcpy(static_cast<void*>(&defaults), given, known);
    return defaults;
  }
  // Writes what fits into the caller's struct, but for its size.
  template <class T>
  void write(const char* name, T* to, T value) const {
    const std::size_t known = known_size(name, to, sizeof(T));
    value.struct_size = to->struct_size;
    std::memcpy(static_cast<void*>(to), &value, known);
  }

  // A tensor that may be NULL.
  Tensor tensor(const char* name, const shunt_tensor* given) const;
  bool flag(const char* name, std::int32_t value) const;
  void reserved(const char* name, std::int32_t value) const;
  // One of an enumeration that runs from 0 to `last`.
  template <class Enum>
  Enum choice(const char* name, std::int32_t value, Enum last) const {
    if (value < 0 || value > static_cast<std::int32_t>(last)) {
      wrong("{} is {}: must be 0 to {}", name, value, static_cast<std::int32_t>(last));
    }
    return static_cast<Enum>(value);
  }
  void text(const std::string& whole, char* to, std::size_t capacity, std::size_t* length) const;

 private:
  // Bytes to copy of a struct that this library knows `size` bytes of.
  std::size_t known_size(const char* name, const void* given, std::size_t size) const;
  const char* function_;
};

// body(call) with every exception turned into a status.
template <class Body>
shunt_status run(const char* function, const Body& body) noexcept {
  try {
    body(Call(function));
    set_last_error("");
    return SHUNT_OK;
  } catch (...) {
    return handle_exception();
  }
}

// Whether an engine computes a spec, as a status.
template <class Body>
shunt_status run_supports(const char* function, const Body& support) noexcept {
  return run(function, [&](const Call& call) {
    const Support answer = support(call);
    if (!answer) throw Error(Status::unsupported, answer.reason);
  });
}

shunt_tensor to_c(const Tensor& tensor);

}  // namespace shunt::capi

struct shunt_context {
  shunt::Context context;
};
struct shunt_buffer {
  shunt::Buffer buffer;
};
