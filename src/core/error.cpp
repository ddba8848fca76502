#include "shunt/error.hpp"

namespace shunt {

const char* to_string(Status status) {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::invalid_argument:
      return "invalid argument";
    case Status::unsupported:
      return "unsupported";
    case Status::bad_file:
      return "bad file";
    case Status::io:
      return "input/output error";
    case Status::out_of_memory:
      return "out of memory";
    case Status::internal:
      return "internal error";
  }
  return "unknown status";
}

Error::Error(Status status, const std::string& message)
    : std::runtime_error(message), status_(status) {}

}  // namespace shunt
