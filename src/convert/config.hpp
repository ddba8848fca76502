// What config.json says of the method that packed a checkpoint's weights.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shunt {

inline constexpr std::size_t max_config_bytes = 64u << 20;

// Removes it, wherever it stands.
void forget_packing(nlohmann::ordered_json& config);

// How the cache of keys and values is stored, which is said there too but is not about weights.
struct CacheScheme {
  nlohmann::ordered_json scheme;      // kv_cache_scheme for the method that is written; null: none
  std::vector<std::string> left_out;  // fields that no new file has
};
// Of config.json, or where that names no method hf_quant_config.json, which is not copied.
// `writes_method`: the new config.json has one of its own; `stays`: it has the source's.
CacheScheme cache_scheme_of(const std::string& folder, bool writes_method, bool stays);

}  // namespace shunt
