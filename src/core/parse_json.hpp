// Parsing JSON with an eye on keys that stand twice, of which the JSON library keeps the last.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace shunt {

// Where a byte is 0, which the JSON library takes for the end of the text, whatever stands behind
// it; npos: nowhere. JSON has none.
inline std::size_t zero_byte_in(std::string_view text) { return text.find('\0'); }

// What the library says of an error, without its name for it: "[json.exception.parse_error.101] ".
inline std::string_view error_words(std::string_view what) {
  const std::size_t end = what.starts_with("[json.exception.") ? what.find("] ") : what.npos;
  return end == what.npos ? what : what.substr(end + 2);
}

// `twice`: a key that one object has twice, or "". Throws what the library throws.
nlohmann::json parse_watching(std::string_view text, std::string& twice);

}  // namespace shunt
