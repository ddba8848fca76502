#include "core/parse_json.hpp"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace shunt {

nlohmann::json parse_watching(std::string_view text, std::string& twice) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;
  twice.clear();
  const auto watch = [&](int, Event event, nlohmann::json& value) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && twice.empty()) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  return nlohmann::json::parse(text, watch);
}

}  // namespace shunt
