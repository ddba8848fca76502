// JSON from files that nobody vouches for.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/shown.hpp"

namespace shunt {

// Parses a JSON object, or throws Error{bad_file} that begins with `what`: not JSON, a key twice in
// one object, nesting deeper than 64, something else than an object. Python's NaN, Infinity and
// -Infinity become strings of that name, so that only a reader that wants a number there objects.
nlohmann::json parse_object(std::string_view what, std::string_view text);

// An object that is read to be written again, its fields in their order.
class RewrittenObject {
 public:
  // Throws what parse_object() throws.
  RewrittenObject(std::string_view what, std::string_view text);

  // Two spaces a level; Python's non-numbers stand in it as they did.
  std::string text() const;

  nlohmann::ordered_json json;  // non-numbers are strings, which are not to be changed

 private:
  std::string mark_ = "~";  // stands before them and nowhere else
};

// What an object has under a key; nullptr if nothing, or a null, which says no more than absence.
const nlohmann::json* child(const nlohmann::json& object, std::string_view key);

}  // namespace shunt
