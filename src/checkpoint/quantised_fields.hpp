// What readers of quantization_config share: fields of one object, and what they say of formats.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/quantised.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

using Json = nlohmann::json;

using Formats = std::vector<Format>;

// Which of them, the shape of the scales says.
inline Formats fp8(const Formats& others = {}) {
  Formats all = {Format::fp8_tensor, Format::fp8_channel, Format::fp8_block};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

// A legal value of a field, and the formats that it means; none: it says nothing of them.
struct Meaning {
  Json value;
  Formats formats;
};

class Fields {
 public:
  Fields(std::string where, const Json& object) : where_(std::move(where)), object_(object) {}

  const Json* get(std::string_view key) const { return child(object_, key); }
  void expect(std::string_view key, const std::vector<Json>& legal) const {
    const Json* const value = get(key);
    if (value == nullptr || std::find(legal.begin(), legal.end(), *value) != legal.end()) return;
    std::string list;
    for (const Json& one : legal) list += (list.empty() ? "" : " or ") + one.dump();
    refuse(key, *value, list);
  }
  void expect_empty(std::string_view key) const {
    const Json* const value = get(key);
    if (value != nullptr && !value->empty()) refuse(key, *value, "empty");
  }
  // The field, if it is there, as later messages have it.
  std::string says(std::string_view key) const {
    const Json* const value = get(key);
    return value == nullptr ? std::string()
                            : fmt::format("{}: {} is {}", where_, key, shown(*value));
  }
  // A field whose value must be one of these, and one that may have others, which say nothing.
  void claim(std::string_view key, const std::vector<Meaning>& legal,
             std::vector<QuantisedClaim>& to) const {
    std::vector<Json> values;
    for (const Meaning& meaning : legal) values.push_back(meaning.value);
    expect(key, values);
    claim_if_known(key, legal, to);
  }
  void claim_if_known(std::string_view key, const std::vector<Meaning>& known,
                      std::vector<QuantisedClaim>& to) const {
    for (const Meaning& meaning : known) {
      if (get(key) == nullptr || *get(key) != meaning.value || meaning.formats.empty()) continue;
      to.push_back({says(key), meaning.formats});
    }
  }
  std::optional<bool> flag(std::string_view key) const {
    expect(key, {true, false});
    const Json* const value = get(key);
    return value == nullptr ? std::nullopt : std::optional<bool>(value->get<bool>());
  }
  // A group size that is there: an integer, -1 for a whole row. ModelOpt's 0 is none.
  void add_group(std::string_view key, QuantisedScheme& to) const {
    const Json* const value = get(key);
    if (value == nullptr || *value == 0) return;
    const std::int64_t size = value->is_number_integer() ? value->get<std::int64_t>() : 0;
    const bool legal = size == -1 || (size >= 16 && size <= (1 << 24) && size % 16 == 0);
    if (!legal) refuse(key, *value, "-1 or a multiple of 16");
    to.groups.push_back(static_cast<int>(size));
    Formats formats = fp8({Format::int8, Format::int4});  // int4: its own groups are compared
    if (size == 16) formats.push_back(Format::nvfp4);
    if (size == 32) formats.insert(formats.end(), {Format::mxfp4, Format::mxfp8});
    to.claims.push_back({says(key), formats});
  }
  // The modules that a list names.
  void add_modules(std::string_view key, ListSyntax syntax, ModuleList& to) const {
    const Json* const value = get(key);
    if (value == nullptr) return;
    if (!value->is_array()) refuse(key, *value, "a list of names");
    for (const Json& name : *value) {
      if (!name.is_string()) refuse(key, *value, "a list of names");
      try {
        to.add(syntax, name.get_ref<const std::string&>());
      } catch (const Error& error) {
        fail(Status::unsupported, "{}: {}: {}", where_, key, error.what());
      }
    }
  }
  [[noreturn]] void refuse(std::string_view key, const Json& value,
                           const std::string& legal) const {
    fail(Status::unsupported, "{}: {} is {}: must be {}", where_, key, shown(value), legal);
  }
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  const Json& object_;
};

// The methods with files of their own.
void read_gptq(const Fields& f, QuantisedScheme base, QuantisedConfig& out);
void read_auto_round(const Fields& f, QuantisedScheme base, QuantisedConfig& out);
void read_quark(const Fields& f, QuantisedConfig& out);

}  // namespace shunt
