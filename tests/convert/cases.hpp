// What tests of conversions convert, to what, and the bytes that come of it.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "checkpoint/temporary.hpp"
#include "convert/conversion.hpp"
#include "models.hpp"

namespace shunt::test {

inline ConversionOptions to(const std::string& format) {
  return {.spec = conversion_from_string(format), .calibrate = {}};
}
inline ConversionOptions pruned(const std::string& format, PruneMethod method,
                                PrunePattern pattern = PrunePattern::two_of_four) {
  ConversionOptions options = to(format);
  options.spec.prune = true;
  options.spec.pruning.method = method;
  options.spec.pruning.pattern = pattern;
  if (method != PruneMethod::magnitude) options.calibrate = tiny_moe + "/activations.safetensors";
  return options;
}

// A new folder with a golden's config and tensors.
inline void copy_without_recordings(const std::string& family, const std::string& folder) {
  std::filesystem::create_directory(folder);
  for (const std::string name : {"/config.json", "/model.safetensors"}) {
    std::filesystem::copy_file(golden(family) + name, folder + name);
  }
}

// Every file of a folder and its contents.
inline std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path().string());
  }
  return files;
}

}  // namespace shunt::test
