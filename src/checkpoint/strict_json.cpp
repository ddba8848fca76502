#include "checkpoint/strict_json.hpp"

#include <array>
#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/parse_json.hpp"

namespace shunt {

namespace {

constexpr int max_depth = 64;

constexpr std::array<std::string_view, 3> non_numbers = {"-Infinity", "Infinity", "NaN"};

// Walks the text outside strings: bounds the nesting, on which the parser recurses when it frees
// what it built, and quotes Python's non-numbers, with `mark` before them. Returns what to parse.
std::string prepare(std::string_view what, std::string_view text, std::string_view mark = "") {
  std::string result;
  result.reserve(text.size());
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\' && i + 1 < text.size()) result += text[i++];
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > max_depth) {
        fail(Status::bad_file, "{}: JSON nests deeper than {}", what, max_depth);
      }
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == '-' || c == 'I' || c == 'N') {
      bool replaced = false;
      for (const std::string_view word : non_numbers) {
        if (text.substr(i, word.size()) != word) continue;
        result += '"';
        result += mark;
        result += word;
        result += '"';
        i += word.size();
        replaced = true;
        break;
      }
      if (replaced) continue;
    }
    result += text[i++];
  }
  return result;
}

}  // namespace

nlohmann::json parse_object(std::string_view what, std::string_view text) {
  const std::string prepared = prepare(what, text);
  std::string duplicate;
  nlohmann::json json;
  if (const std::size_t at = zero_byte_in(text); at != text.npos) {
    fail(Status::bad_file, "{}: not JSON: byte {} is 0", what, at);
  }
  try {
    json = parse_watching(prepared, duplicate);
  } catch (const nlohmann::json::exception& error) {
    fail(Status::bad_file, "{}: not JSON: {}", what, clean(error_words(error.what())));
  }
  if (!duplicate.empty()) {
    fail(Status::bad_file, "{}: key '{}' stands twice in one object", what, clean(duplicate));
  }
  if (!json.is_object()) fail(Status::bad_file, "{} is {}: must be an object", what, shown(json));
  return json;
}

RewrittenObject::RewrittenObject(std::string_view what, std::string_view text) {
  const std::string strings = parse_object(what, text).dump();
  while (strings.find(mark_) != std::string::npos) mark_ += mark_.front();
  json = nlohmann::ordered_json::parse(prepare(what, text, mark_));
}

std::string RewrittenObject::text() const {
  std::string result = json.dump(2);
  for (const std::string_view word : non_numbers) {
    const std::string quoted = fmt::format("\"{}{}\"", mark_, word);
    for (std::size_t at = 0; (at = result.find(quoted, at)) != std::string::npos;) {
      result.replace(at, quoted.size(), word);
    }
  }
  return result;
}

const nlohmann::json* child(const nlohmann::json& object, std::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

}  // namespace shunt
