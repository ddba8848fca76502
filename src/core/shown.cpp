#include "core/shown.hpp"

#include <nlohmann/json.hpp>

namespace shunt {

std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string clean(std::string_view text) {
  std::string result(text.substr(0, 120));
  for (char& c : result) {
    const auto u = static_cast<unsigned char>(c);
    if (u < 0x20 || u == 0x7f) c = '?';
  }
  if (text.size() > 120) result += "...";
  return result;
}

}  // namespace shunt
