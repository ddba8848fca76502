#include "convert/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/strict_json.hpp"

namespace shunt {

namespace {

constexpr const char* packing_fields[] = {"quantization_config", "compression_config",
                                          "expert_dtype"};

// What a method says of the cache of keys and values, and not of weights.
void add_cache_fields(const nlohmann::json& method, nlohmann::json& fields) {
  for (const auto& item : method.items()) {
    const nlohmann::json& value = item.value();
    if (!item.key().starts_with("kv_cache")) {
      if (value.is_object()) add_cache_fields(value, fields);
    } else if (!value.empty() && value != false) {
      fields[item.key()] = value;
    }
  }
}

// The same of every method in a config.json. Whether there is one.
bool find_cache_fields(const nlohmann::json& object, nlohmann::json& fields) {
  bool found = false;
  for (const auto& item : object.items()) {
    if (!item.value().is_object()) continue;
    if (std::find(std::begin(packing_fields), std::end(packing_fields), item.key()) !=
        std::end(packing_fields)) {
      add_cache_fields(item.value(), fields);
      found = true;
    } else {
      found = find_cache_fields(item.value(), fields) || found;
    }
  }
  return found;
}

nlohmann::json object_in(const std::string& path) {
  return parse_object(path, read_text(path, max_config_bytes));
}

}  // namespace

void forget_packing(nlohmann::ordered_json& config) {
  for (const char* field : packing_fields) config.erase(field);
  for (const auto& item : config.items()) {
    if (item.value().is_object()) forget_packing(item.value());
  }
}

CacheScheme cache_scheme_of(const std::string& folder, bool writes_method, bool stays) {
  std::string holder = "config.json";
  nlohmann::json fields = nlohmann::json::object();
  if (find_cache_fields(object_in(folder + "/" + holder), fields)) {
    if (stays) return {};
  } else {
    holder = "hf_quant_config.json";
    const std::string path = folder + "/" + holder;
    if (file_exists(path)) add_cache_fields(object_in(path), fields);
  }
  CacheScheme result;
  if (writes_method) {
    if (const nlohmann::json* const scheme = child(fields, "kv_cache_scheme")) {
      result.scheme = *scheme;
    } else if (fields.contains("kv_cache_quant_algo") && fields["kv_cache_quant_algo"] == "FP8") {
      result.scheme = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
    }
    fields.erase("kv_cache_scheme");
    if (!result.scheme.is_null()) fields.erase("kv_cache_quant_algo");  // the same in a word
  }
  for (const auto& item : fields.items()) {
    result.left_out.push_back(fmt::format("{} of {}", clean(item.key()), holder));
  }
  return result;
}

}  // namespace shunt
