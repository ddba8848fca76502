// Errors: one exception type, whose status is also what the C ABI returns.
#pragma once

#include <stdexcept>
#include <string>

namespace shunt {

enum class Status : int {
  ok = 0,
  invalid_argument = 1,  // a value, shape, dtype or pointer that is never legal
  unsupported = 2,       // legal, but this engine, device or build does not compute it
  bad_file = 3,          // a file whose contents are malformed or not understood
  io = 4,                // the operating system refused: missing file, permission, full disk
  out_of_memory = 5,
  internal = 6,  // a bug of the library
};

const char* to_string(Status status);

// What every function of the library throws; besides it std::bad_alloc alone, where memory for its
// own small things is out. what() is one line that names the argument, its value and what is legal.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message);
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// Whether an engine computes a spec. `reason` says why not, and is empty when `supported`.
struct Support {
  bool supported = true;
  std::string reason;
  explicit operator bool() const { return supported; }
  static Support no(std::string why) { return {false, std::move(why)}; }
};

}  // namespace shunt
