// Reading a spec's JSON strictly: every key is known, every value has its type and range.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shunt {

// Parses `text`, or throws Error{invalid_argument} that begins with `what`.
nlohmann::json parse_json(std::string_view what, const std::string& text);

// A JSON object of which every key must be asked for before finish().
class SpecReader {
 public:
  // `path` prefixes messages: "RouteSpec" or "RouteSpec.groups". Throws unless json is an object.
  SpecReader(std::string path, const nlohmann::json& json);

  // Each leaves `value` alone when the key is absent, and throws for another type or out of range.
  void read(std::string_view key, bool& value);
  void read(std::string_view key, int& value, std::int64_t low, std::int64_t high);
  void read(std::string_view key, std::int64_t& value, std::int64_t low, std::int64_t high);
  void read(std::string_view key, float& value);  // finite
  // One of `names`, by its position.
  template <class Enum>
  void read(std::string_view key, Enum& value, const std::vector<std::string_view>& names) {
    value = static_cast<Enum>(read_enum(key, static_cast<int>(value), names));
  }
  // The object at `key`, or null.
  const nlohmann::json* object(std::string_view key);
  // As above, and the key must be there.
  void require(std::string_view key);
  const std::string& path() const { return path_; }
  // Throws for a key that nothing asked for.
  void finish() const;

 private:
  const nlohmann::json* find(std::string_view key);
  int read_enum(std::string_view key, int value, const std::vector<std::string_view>& names);
  std::string path_;
  const nlohmann::json& json_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace shunt
