// Parsing JSON with an eye on keys that stand twice, of which the JSON library keeps the last.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace shunt {

// `twice`: a key that one object has twice, or "". Throws what the library throws.
nlohmann::json parse_watching(std::string_view text, std::string& twice);

}  // namespace shunt
