// Memory that a caller gives, by the name that its parameter has.
#pragma once

#include <cstddef>
#include <string_view>

#include "shunt/context.hpp"

namespace shunt {

// Throws Error{invalid_argument} unless it has `needed` bytes, 64-byte aligned. `name`: "memory".
// check_workspace() is this for a workspace.
void check_memory(std::string_view what, std::string_view name, Workspace memory,
                  std::size_t needed);

}  // namespace shunt
