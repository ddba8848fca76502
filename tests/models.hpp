// The models that tests read: the small language model that ships with the project, and the golden
// checkpoints, a folder a family with what transformers computed in it.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace shunt::test {

inline const std::string tiny_moe = SHUNT_SOURCE_DIR "/models/tiny-moe";
inline const std::string goldens_folder = SHUNT_SOURCE_DIR "/tests/data/goldens";

inline std::string golden(const std::string& family) { return goldens_folder + "/" + family; }

// All families, sorted.
inline std::vector<std::string> golden_families() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(goldens_folder)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Those whose names end in _real have the layouts of others, and real sizes; in _mxfp4 packed
// experts.
inline std::vector<std::string> small_golden_families() {
  std::vector<std::string> names = golden_families();
  std::erase_if(names, [](const std::string& name) {
    return name.ends_with("_real") || name.ends_with("_mxfp4");
  });
  return names;
}

}  // namespace shunt::test
