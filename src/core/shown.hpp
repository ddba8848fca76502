// What others wrote, in a message of one line.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace shunt {

// A value: at most 60 characters.
std::string shown(const nlohmann::json& value);
// Text: control characters become '?', at most 120 characters.
std::string clean(std::string_view text);

}  // namespace shunt
