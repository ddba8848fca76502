#include "checkpoint/config.hpp"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

std::string join(const Config::Names& names) {
  std::string result;
  for (const std::string_view name : names) {
    if (!result.empty()) result += " or ";
    result += name;
  }
  return result;
}

bool is_integer(const nlohmann::json& value, std::int64_t low, std::int64_t high) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{1} << 62) {
    return false;
  }
  const auto number = value.get<std::int64_t>();
  return number >= low && number <= high;
}

bool is_number(const nlohmann::json& value, double low, double high) {
  if (!value.is_number()) return false;
  const double number = value.get<double>();
  return std::isfinite(number) && number >= low && number <= high;
}

std::string integer_rule(std::int64_t low, std::int64_t high) {
  return fmt::format("an integer from {} to {}", low, high);
}

std::string number_rule(double low, double high) {
  return fmt::format("a finite number from {:g} to {:g}", low, high);
}

nlohmann::json json_of(const ConfigValue& value) {
  return std::visit([](const auto& held) { return nlohmann::json(held); }, value);
}

// A name that sounds like experts or routing.
bool suspicious(std::string_view name) {
  static constexpr std::array<std::string_view, 25> parts = {
      "expert",      "moe",         "router",     "routed",   "routing", "route_",    "topk",
      "top_k",       "score_",      "scoring",    "swiglu",   "n_group", "num_group", "shared_in",
      "group_limit", "sparse_step", "correction", "capacity", "latent",  "hash",      "hidden_act",
      "activation",  "ffn_",        "mlp_",       "dense"};
  // Of attention, vision, state-space and multi-token-prediction parts.
  static constexpr std::array<std::string_view, 13> others = {
      "index_", "indexer_", "attention_", "attn_",    "mamba_", "mtp_",         "vision_",
      "audio_", "rope_",    "linear_",    "kv_lora_", "ngram_", "num_attention"};
  for (const std::string_view other : others) {
    if (name.substr(0, other.size()) == other) return false;
  }
  for (const std::string_view part : parts) {
    if (name.find(part) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

Config::Config(std::string where, const nlohmann::json& object)
    // A pointer that owns nothing.
    : Config(std::move(where),
             std::shared_ptr<const nlohmann::json>(std::shared_ptr<void>(), &object)) {}

Config::Config(std::string where, std::shared_ptr<const nlohmann::json> object)
    : where_(std::move(where)), json_(std::move(object)) {
  if (!json_->is_object()) {
    fail(Status::bad_file, "{} is {}: must be an object", where_, shown(*json_));
  }
}

Config Config::parse(const std::string& where, std::string_view text) {
  return Config(where, std::make_shared<const nlohmann::json>(parse_object(where, text)));
}

bool Config::has(std::string_view name) const {
  const auto found = json_->find(std::string(name));
  return found != json_->end() && !found->is_null();
}

bool Config::is_list(std::string_view name) const {
  const auto found = json_->find(name);
  return found != json_->end() && found->is_array();
}

bool Config::is_null(std::string_view name) const {
  const auto found = json_->find(std::string(name));
  return found != json_->end() && found->is_null();
}

std::string_view Config::name_of(const Names& names) const {
  for (const std::string_view name : names) {
    if (has(name)) return name;
  }
  return names.front();
}

const nlohmann::json* Config::find(const Names& names) {
  const nlohmann::json* result = nullptr;
  std::string_view first;
  for (const std::string_view name : names) {
    known_.emplace(name);
    if (!has(name)) continue;
    const nlohmann::json& value = (*json_)[std::string(name)];
    if (result == nullptr) {
      result = &value;
      first = name;
    } else if (*result != value) {
      fail(Status::bad_file, "{}: {} is {} but {} is {}: both name the same, and must be equal",
           where_, first, shown(*result), name, shown(value));
    }
  }
  return result;
}

void Config::refuse(std::string_view name, std::string_view legal) const {
  const auto found = json_->find(std::string(name));
  if (found == json_->end()) {
    fail(Status::bad_file, "{}: {} is missing: must be {}", where_, name, legal);
  }
  fail(Status::bad_file, "{}: {} is {}: must be {}", where_, name, shown(*found), legal);
}

// A null is no more than absence only where absence changes nothing: code of models takes it for
// false, or for no limit at all.
void Config::refuse_null(const Names& names, std::string_view legal) const {
  for (const std::string_view name : names) {
    if (is_null(name)) refuse(name, legal);
  }
}

std::int64_t Config::integer(const Names& names, std::int64_t low, std::int64_t high) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) {
    fail(Status::bad_file, "{}: {} is missing: must be {}", where_, join(names),
         integer_rule(low, high));
  }
  if (!is_integer(*value, low, high)) {
    fail(Status::bad_file, "{}: {} is {}: must be {}", where_, name_of(names), shown(*value),
         integer_rule(low, high));
  }
  return value->get<std::int64_t>();
}

std::int64_t Config::integer_or(const Names& names, std::int64_t absent, std::int64_t low,
                                std::int64_t high) {
  const std::optional<std::int64_t> value = integer_if(names, low, high);
  if (!value && absent > 1) refuse_null(names, integer_rule(low, high));
  return value.value_or(absent);
}

std::optional<std::int64_t> Config::integer_if(const Names& names, std::int64_t low,
                                               std::int64_t high) {
  if (find(names) == nullptr) return std::nullopt;
  return integer(names, low, high);
}

double Config::number_or(const Names& names, double absent, double low, double high) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) {
    if (absent != 0 && absent != 1) refuse_null(names, number_rule(low, high));
    return absent;
  }
  if (!is_number(*value, low, high)) {
    fail(Status::bad_file, "{}: {} is {}: must be {}", where_, name_of(names), shown(*value),
         number_rule(low, high));
  }
  return value->get<double>();
}

bool Config::flag_or(const Names& names, bool absent) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) {
    if (absent) refuse_null(names, "true or false");
    return absent;
  }
  if (!value->is_boolean()) {
    fail(Status::bad_file, "{}: {} is {}: must be true or false", where_, name_of(names),
         shown(*value));
  }
  return value->get<bool>();
}

std::string Config::text_or(const Names& names, std::string_view absent) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return std::string(absent);
  if (!value->is_string()) {
    fail(Status::bad_file, "{}: {} is {}: must be a string", where_, name_of(names), shown(*value));
  }
  return value->get<std::string>();
}

std::optional<std::vector<std::int64_t>> Config::integers(const Names& names, std::int64_t low,
                                                          std::int64_t high) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return std::nullopt;
  std::vector<std::int64_t> result;
  bool legal = value->is_array();
  if (legal) {
    for (const nlohmann::json& element : *value) {
      legal = legal && is_integer(element, low, high);
      if (legal) result.push_back(element.get<std::int64_t>());
    }
  }
  if (!legal) {
    fail(Status::bad_file, "{}: {} is {}: must be a list, each {}", where_, name_of(names),
         shown(*value), integer_rule(low, high));
  }
  return result;
}

std::optional<std::vector<std::string>> Config::texts(const Names& names) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return std::nullopt;
  std::vector<std::string> result;
  bool legal = value->is_array();
  if (legal) {
    for (const nlohmann::json& element : *value) {
      legal = legal && element.is_string();
      if (legal) result.push_back(element.get<std::string>());
    }
  }
  if (!legal) {
    fail(Status::bad_file, "{}: {} is {}: must be a list of strings", where_, name_of(names),
         shown(*value));
  }
  return result;
}

std::optional<std::vector<double>> Config::numbers(const Names& names, double absent, double low,
                                                   double high) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return std::nullopt;
  std::vector<double> result;
  bool legal = value->is_array();
  if (legal) {
    for (const nlohmann::json& element : *value) {
      legal = legal && (element.is_null() || is_number(element, low, high));
      if (legal) result.push_back(element.is_null() ? absent : element.get<double>());
    }
  }
  if (!legal) {
    fail(Status::bad_file, "{}: {} is {}: must be a list, each null or {}", where_, name_of(names),
         shown(*value), number_rule(low, high));
  }
  return result;
}

std::vector<std::int64_t> Config::integer_per_layer(const Names& names, std::int64_t layers,
                                                    std::int64_t low, std::int64_t high) {
  const nlohmann::json* value = find(names);
  if (value == nullptr || !value->is_array()) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(layers), integer(names, low, high));
  }
  std::vector<std::int64_t> result =
      integers(names, low, high).value_or(std::vector<std::int64_t>());
  if (result.size() < static_cast<std::size_t>(layers)) {
    fail(Status::bad_file, "{}: {} has {} entries: must have one for each of {} layers", where_,
         name_of(names), result.size(), layers);
  }
  return result;
}

const nlohmann::json* Config::object(std::string_view name) {
  const nlohmann::json* value = find({name});
  if (value != nullptr && !value->is_object()) {
    fail(Status::bad_file, "{}: {} is {}: must be an object", where_, name, shown(*value));
  }
  return value;
}

std::vector<Config> Config::objects(std::string_view name) {
  std::vector<Config> all;
  const nlohmann::json* value = find({name});
  if (value == nullptr) return all;
  if (!value->is_array()) {
    fail(Status::bad_file, "{}: {} is {}: must be a list of objects", where_, name, shown(*value));
  }
  for (const nlohmann::json& element : *value) {
    const std::string where = fmt::format("{}: {}[{}]", where_, name, all.size());
    if (!element.is_object()) {
      fail(Status::bad_file, "{} is {}: must be an object", where, shown(element));
    }
    all.emplace_back(where, element);
  }
  return all;
}

void Config::expect(std::string_view name, const std::vector<ConfigValue>& legal) {
  const nlohmann::json* value = find({name});
  if (value == nullptr) return;
  std::string words;
  for (const ConfigValue& one : legal) {
    const nlohmann::json json = json_of(one);
    if (*value == json) return;
    if (!words.empty()) words += " or ";
    words += json.dump();
  }
  fail(Status::unsupported, "{}: {} is {}: only {} is understood", where_, name, shown(*value),
       words);
}

void Config::expect_false(const Names& names) {
  for (const std::string_view name : names) expect(name, {false});
}

bool Config::element_is(std::string_view name, std::size_t i, const ConfigValue& value) {
  const nlohmann::json* list = find({name});
  return list != nullptr && list->is_array() && i < list->size() && (*list)[i] == json_of(value);
}

void Config::ignore(const Names& names) {
  for (const std::string_view name : names) known_.emplace(name);
}

void Config::finish(std::string_view family) const {
  for (const auto& item : json_->items()) {
    // Of sampling: older files of nested models hold it, and no family calls a choice of experts
    // so.
    if (item.key() == "top_k") continue;
    if (item.value().is_null() || known_.contains(item.key()) || !suspicious(item.key())) continue;
    fail(Status::unsupported,
         "{}: {} is {}: not understood for {}, and it may change the mathematics", where_,
         clean(item.key()), shown(item.value()), family);
  }
  // What transformers 5.24 lets a layer have of its own, by the layer's number.
  const auto layers = json_->find("per_layer_config");
  if (layers == json_->end() || !layers->is_object()) return;
  for (const auto& layer : layers->items()) {
    if (!layer.value().is_object()) continue;
    for (const auto& item : layer.value().items()) {
      const auto whole = json_->find(item.key());
      if (whole != json_->end() && *whole == item.value()) continue;
      if (item.key() != "skip" && !known_.contains(item.key()) && !suspicious(item.key())) continue;
      fail(Status::unsupported,
           "{}: per_layer_config has {} {} for layer {}: not understood, only what all layers have "
           "in common",
           where_, clean(item.key()), shown(item.value()), clean(layer.key()));
    }
  }
}

}  // namespace shunt
