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

// `twice`: a key that one object has twice, or "". Throws what the library throws.
nlohmann::json parse_watching(std::string_view text, std::string& twice);

}  // namespace shunt
