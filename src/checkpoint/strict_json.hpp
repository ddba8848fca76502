// JSON from files that nobody vouches for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace shunt {

// Parses a JSON object, or throws Error{bad_file} that begins with `what`: not JSON, a key twice in
// one object, nesting deeper than 64, something else than an object. Python's NaN, Infinity and
// -Infinity become strings of that name, so that only a reader that wants a number there objects.
nlohmann::json parse_object(std::string_view what, std::string_view text);

// A value in a message: one line, at most 60 characters.
std::string shown(const nlohmann::json& value);
// Text from a file in a message: control characters become '?', at most 120 characters.
std::string clean(std::string_view text);

}  // namespace shunt
