#include "core/json.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.hpp"
#include "core/parse_json.hpp"
#include "core/shown.hpp"

namespace shunt {

namespace {

nlohmann::json parse_json(std::string_view what, const std::string& text) {
  // Nesting is bounded first: the parser's own recursion in dump() and destructors is not.
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > 64) fail(Status::invalid_argument, "{}: JSON nests deeper than 64", what);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  if (const std::size_t at = zero_byte_in(text); at != text.npos) {
    fail(Status::invalid_argument, "{}: not JSON: byte {} is 0", what, at);
  }
  try {
    std::string twice;
    nlohmann::json json = parse_watching(text, twice);
    if (twice.empty()) return json;
    fail(Status::invalid_argument, "{}: key '{}' stands twice in one object", what, clean(twice));
  } catch (const nlohmann::json::exception& error) {
    fail(Status::invalid_argument, "{}: not JSON: {}", what, clean(error_words(error.what())));
  }
}

}  // namespace

// Neither way asks the locale what a decimal point is.
double shortest(float value) {
  const std::string text = fmt::format("{}", value);
  double result = 0;
  std::from_chars(text.data(), text.data() + text.size(), result);
  // Of 7.038531e-26 the nearest double lies beyond the middle to the next float.
  return static_cast<float>(result) == value ? result : static_cast<double>(value);
}

SpecWriter& SpecWriter::add_json(std::string_view key, std::string_view json) {
  fields_ += fmt::format("{}\"{}\":{}", fields_.empty() ? "" : ",", key, json);
  return *this;
}

SpecWriter& SpecWriter::add(std::string_view key, bool value) {
  return add_json(key, value ? "true" : "false");
}

SpecWriter& SpecWriter::add(std::string_view key, int value) {
  return add(key, std::int64_t{value});
}

SpecWriter& SpecWriter::add(std::string_view key, std::int64_t value) {
  return add_json(key, fmt::format("{}", value));
}

SpecWriter& SpecWriter::add(std::string_view key, float value) {
  return add(key, static_cast<double>(value));
}

SpecWriter& SpecWriter::add(std::string_view key, double value) {
  return add_json(key, nlohmann::json(value).dump());
}

SpecWriter& SpecWriter::add(std::string_view key, std::string_view value) {
  return add_json(key, nlohmann::json(value).dump());
}

SpecWriter& SpecWriter::add(std::string_view key, const char* value) {
  return add(key, std::string_view(value));
}

SpecWriter& SpecWriter::add(std::string_view key, const SpecWriter& value) {
  return add_json(key, value.text());
}

SpecReader::SpecReader(std::string path, const std::string& text)
    : path_(std::move(path)), json_(std::make_shared<nlohmann::json>(parse_json(path_, text))) {}

SpecReader::SpecReader(std::string path, std::shared_ptr<nlohmann::json> json)
    : path_(std::move(path)), json_(std::move(json)) {}

void SpecReader::check_object() const {
  if (!json_->is_object()) {
    fail(Status::invalid_argument, "{} is {}: must be a JSON object", path_, shown(*json_));
  }
}

nlohmann::json* SpecReader::find(std::string_view key) {
  check_object();
  known_.emplace(key);
  const auto found = json_->find(std::string(key));
  return found == json_->end() ? nullptr : &*found;
}

void SpecReader::read(std::string_view key, bool& value) {
  const nlohmann::json* found = find(key);
  if (found == nullptr) return;
  if (!found->is_boolean()) {
    fail(Status::invalid_argument, "{}.{} is {}: must be true or false", path_, key, shown(*found));
  }
  value = found->get<bool>();
}

void SpecReader::read(std::string_view key, std::int64_t& value, std::int64_t low,
                      std::int64_t high) {
  const nlohmann::json* found = find(key);
  if (found == nullptr) return;
  const bool huge = found->is_number_unsigned() &&
                    found->get<std::uint64_t>() >
                        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!found->is_number_integer() || huge || found->get<std::int64_t>() < low ||
      found->get<std::int64_t>() > high) {
    fail(Status::invalid_argument, "{}.{} is {}: must be an integer from {} to {}", path_, key,
         shown(*found), low, high);
  }
  value = found->get<std::int64_t>();
}

void SpecReader::read(std::string_view key, int& value, std::int64_t low, std::int64_t high) {
  std::int64_t wide = value;
  read(key, wide, low, high);
  value = static_cast<int>(wide);
}

void SpecReader::read(std::string_view key, float& value) {
  const nlohmann::json* found = find(key);
  if (found == nullptr) return;
  const double number = found->is_number() ? found->get<double>() : std::nan("");
  const auto rounded = static_cast<float>(number);
  // 0 often stands for none, which what is merely small does not.
  if (!std::isfinite(rounded) || (rounded == 0 && number != 0)) {
    fail(Status::invalid_argument, "{}.{} is {}: must be a finite f32 number", path_, key,
         shown(*found));
  }
  value = rounded;
}

int SpecReader::read_enum(std::string_view key, int value,
                          const std::vector<std::string_view>& names) {
  const nlohmann::json* found = find(key);
  if (found == nullptr) return value;
  if (found->is_string()) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (found->get_ref<const std::string&>() == names[i]) return static_cast<int>(i);
    }
  }
  fail(Status::invalid_argument, "{}.{} is {}: must be one of {}", path_, key, shown(*found),
       fmt::join(names, ", "));
}

std::optional<SpecReader> SpecReader::object(std::string_view key) {
  nlohmann::json* found = find(key);
  if (found == nullptr) return std::nullopt;
  return SpecReader(fmt::format("{}.{}", path_, key), {json_, found});
}

std::optional<std::string> SpecReader::json(std::string_view key) {
  const nlohmann::json* found = find(key);
  if (found == nullptr) return std::nullopt;
  return found->dump();
}

void SpecReader::require(std::string_view key) {
  if (find(key) == nullptr) fail(Status::invalid_argument, "{}.{} is missing", path_, key);
}

void SpecReader::finish() const {
  check_object();
  for (const auto& [key, value] : json_->items()) {
    if (known_.find(key) == known_.end()) {
      fail(Status::invalid_argument, "{}.{} is unknown; known are {}", path_, clean(key),
           fmt::join(known_, ", "));
    }
  }
}

bool SpecReader::has(std::string_view key) const { return json_->contains(std::string(key)); }

std::optional<std::string> SpecReader::take_text(std::string_view key) {
  if (!json_->is_object()) return std::nullopt;
  const auto found = json_->find(std::string(key));
  if (found == json_->end() || !found->is_string()) return std::nullopt;
  std::string text = std::move(found->get_ref<std::string&>());
  json_->erase(found);
  return text;
}

}  // namespace shunt
