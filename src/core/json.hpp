// The JSON of specs: written in one order, read strictly. What includes this compiles without the
// JSON library, which costs several seconds a file.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace shunt {

// One JSON object, in one line. Keys stay in the order of add(), and are written as they are: plain
// words, each once.
class SpecWriter {
 public:
  SpecWriter& add(std::string_view key, bool value);
  SpecWriter& add(std::string_view key, int value);
  SpecWriter& add(std::string_view key, std::int64_t value);
  // As the double of that value prints: 2.827f as 2.8269999027252197. See shortest().
  SpecWriter& add(std::string_view key, float value);
  SpecWriter& add(std::string_view key, double value);
  SpecWriter& add(std::string_view key, std::string_view value);
  SpecWriter& add(std::string_view key, const char* value);  // which would else be a bool
  SpecWriter& add(std::string_view key, const SpecWriter& value);
  // JSON as another spec's to_json() gives it.
  SpecWriter& add_json(std::string_view key, std::string_view json);
  std::string text() const { return "{" + fields_ + "}"; }

 private:
  std::string fields_;
};

// JSON holds doubles; this one prints as the float does: 2.827, not 2.8269999027252197.
double shortest(float value);

// A JSON object of which every key must be asked for before finish(). A copy reads the same object.
class SpecReader {
 public:
  // Parses `text`. `path` prefixes messages: "RouteSpec". Throws Error{invalid_argument} for what
  // is not JSON; for another JSON than an object, as soon as a field is read or finish() is called.
  SpecReader(std::string path, const std::string& text);

  // Each leaves `value` alone when the key is absent, and throws for another type or out of range.
  void read(std::string_view key, bool& value);
  void read(std::string_view key, int& value, std::int64_t low, std::int64_t high);
  void read(std::string_view key, std::int64_t& value, std::int64_t low, std::int64_t high);
  void read(std::string_view key, float& value);  // finite, 0 only where it is
  // One of `names`, by its position.
  template <class Enum>
  void read(std::string_view key, Enum& value, const std::vector<std::string_view>& names) {
    value = static_cast<Enum>(read_enum(key, static_cast<int>(value), names));
  }
  // A reader of the object at `key`, with the path "RouteSpec.groups"; none when absent.
  std::optional<SpecReader> object(std::string_view key);
  // The JSON at `key`, for the reader of another spec; none when absent.
  std::optional<std::string> json(std::string_view key);
  // The key must be there.
  void require(std::string_view key);
  // Throws for a key that nothing asked for.
  void finish() const;

  // These ask for no field, and are for JSON of any kind: whether there is such a key; the string
  // there, which is taken out, or none.
  bool has(std::string_view key) const;
  std::optional<std::string> take_text(std::string_view key);

 private:
  SpecReader(std::string path, std::shared_ptr<nlohmann::json> json);
  nlohmann::json* find(std::string_view key);
  void check_object() const;
  int read_enum(std::string_view key, int value, const std::vector<std::string_view>& names);
  std::string path_;
  std::shared_ptr<nlohmann::json> json_;  // the whole text's, of which a nested reader sees a part
  std::set<std::string, std::less<>> known_;
};

}  // namespace shunt
