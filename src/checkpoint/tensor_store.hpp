// The tensors of a checkpoint folder, over all its files.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shunt/safetensors.hpp"

namespace shunt {

// model.safetensors, or the shards that model.safetensors.index.json lists. Opening checks every
// header, and that each shard has the tensors that the index says it has.
class TensorStore {
 public:
  static TensorStore open(const std::string& folder);
  // Tensors in memory of the caller's, as if the folder had them.
  static TensorStore of(const std::string& folder, std::map<std::string, Tensor> tensors);

  bool contains(const std::string& name) const { return files_of_.contains(name); }
  Tensor get(const std::string& name) const;  // throws Error{bad_file} when not there
  // As SafetensorsFile's.
  std::vector<std::int64_t> shape(const std::string& name) const;
  Tensor flat(const std::string& name) const;
  std::string file_of(const std::string& name) const;  // for messages
  std::vector<std::string> names() const;
  // Those that begin with `start`.
  std::vector<std::string> names_from(const std::string& start) const;
  // Of names that begin with `start` those that a file holds and the index does not name there,
  // with the file. Other programs read whole files.
  std::vector<std::pair<std::string, const SafetensorsFile*>> unnamed_from(
      const std::string& start) const;
  const std::string& folder() const { return folder_; }
  // None where the tensors are the caller's.
  const std::vector<SafetensorsFile>& files() const { return files_; }

 private:
  std::size_t find(const std::string& name) const;
  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> files_of_;
  std::map<std::string, Tensor> in_memory_;
};

}  // namespace shunt
