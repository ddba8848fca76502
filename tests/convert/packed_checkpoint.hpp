// The recorded packed checkpoints, and copies of them that differ.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "convert/cases.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {

inline const std::string quantised = SHUNT_SOURCE_DIR "/tests/data/quantised";

inline std::string bytes_of(const Tensor& tensor) {
  if (!tensor) return {};
  return {tensor.as<const char>(), static_cast<std::size_t>(tensor.bytes())};
}

// A copy of a checkpoint with bytes of one tensor changed.
inline std::string changed(const TemporaryFolder& at, const std::string& from,
                           const std::string& tensor,
                           const std::function<void(char*, std::size_t)>& change) {
  const SafetensorsFile file = SafetensorsFile::open(from + "/model.safetensors");
  std::string bytes;
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) {
    tensors.emplace_back(name, file.get(name));
    if (name != tensor) continue;
    bytes = bytes_of(tensors.back().second);
    change(bytes.data(), bytes.size());
    tensors.back().second.data = bytes.data();
  }
  EXPECT_FALSE(bytes.empty()) << tensor;
  std::filesystem::create_directory(at / "in");
  write_safetensors(at / "in/model.safetensors", tensors, {{"format", "pt"}});
  write_file(at / "in/config.json", read_file(from + "/config.json"));
  return at / "in";
}

}  // namespace shunt::test
