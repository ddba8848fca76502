// JSON from files that nobody vouches for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "core/shown.hpp"

namespace shunt {

// Parses a JSON object, or throws Error{bad_file} that begins with `what`: not JSON, a key twice in
// one object, nesting deeper than 64, something else than an object. Python's NaN, Infinity and
// -Infinity become strings of that name, so that only a reader that wants a number there objects.
nlohmann::json parse_object(std::string_view what, std::string_view text);

// What an object has under a key; nullptr if nothing, or a null, which says no more than absence.
const nlohmann::json* child(const nlohmann::json& object, std::string_view key);

}  // namespace shunt
