#include "checkpoint/tensor_store.hpp"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

constexpr std::size_t max_index_bytes = 512u << 20;

// A shard is a file of the folder itself: an index must not reach anywhere else.
bool plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.size() < 256 &&
         name.find('/') == std::string::npos && name.find('\\') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// A file that holds a rank's slices, as Grok 2 is published:
// "pytorch_model-00006-TP-000.safetensors".
void refuse_slices(const std::string& folder, const std::string& name) {
  if (name.find("-TP-0") == std::string::npos || !name.ends_with(".safetensors")) return;
  fail(Status::unsupported,
       "{}/{}: holds what one rank of several has of each tensor: must be whole tensors, in "
       "model.safetensors or in the files of model.safetensors.index.json",
       folder, clean(name));
}

void refuse_folder_of_slices(const std::string& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    refuse_slices(folder, entry->path().filename().string());
  }
}

}  // namespace

TensorStore TensorStore::open(const std::string& folder) {
  TensorStore store;
  store.folder_ = folder;
  const std::string single = folder + "/model.safetensors";
  const std::string index = folder + "/model.safetensors.index.json";
  if (file_exists(single) || !file_exists(index)) {
    if (!file_exists(single)) refuse_folder_of_slices(folder);
    store.files_.push_back(SafetensorsFile::open(single));
    for (const std::string& name : store.files_[0].names()) store.files_of_.emplace(name, 0);
    return store;
  }
  const nlohmann::json json = parse_object(index, read_text(index, max_index_bytes));
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object()) {
    fail(Status::bad_file, "{}: weight_map is {}: must be an object of tensor and file names",
         index, map == json.end() ? "missing" : shown(*map));
  }
  std::map<std::string, std::size_t> opened;
  for (const auto& item : map->items()) {
    const std::string& tensor = item.key();
    if (!item.value().is_string() || !plain_file_name(item.value().get<std::string>())) {
      fail(Status::bad_file,
           "{}: tensor '{}' is in {}: must be the name of a file of the same folder", index,
           clean(tensor), shown(item.value()));
    }
    const auto file = item.value().get<std::string>();
    auto found = opened.find(file);
    if (found == opened.end()) {
      refuse_slices(folder, file);
      const std::string path = fmt::format("{}/{}", folder, file);
      if (!file_exists(path)) {
        fail(Status::io, "{}: shard is missing; {} wants tensor '{}' from it", path, index,
             clean(tensor));
      }
      store.files_.push_back(SafetensorsFile::open(path));
      found = opened.emplace(file, store.files_.size() - 1).first;
    }
    if (!store.files_[found->second].contains(tensor)) {
      fail(Status::bad_file, "{}: has no tensor '{}', which {} says it has",
           store.files_[found->second].path(), clean(tensor), index);
    }
    store.files_of_.emplace(tensor, found->second);
  }
  return store;
}

TensorStore TensorStore::of(const std::string& folder, std::map<std::string, Tensor> tensors) {
  TensorStore store;
  store.folder_ = folder;
  for (const auto& [name, tensor] : tensors) store.files_of_.emplace(name, 0);
  store.in_memory_ = std::move(tensors);
  return store;
}

std::size_t TensorStore::find(const std::string& name) const {
  const auto found = files_of_.find(name);
  if (found == files_of_.end()) {
    fail(Status::bad_file, "{}: has no tensor '{}'", folder_, clean(name));
  }
  return found->second;
}

Tensor TensorStore::get(const std::string& name) const {
  const std::size_t file = find(name);
  return files_.empty() ? in_memory_.at(name) : files_[file].get(name);
}

std::vector<std::int64_t> TensorStore::shape(const std::string& name) const {
  const std::size_t file = find(name);
  if (!files_.empty()) return files_[file].shape(name);
  const Tensor& tensor = in_memory_.at(name);
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

Tensor TensorStore::flat(const std::string& name) const {
  const std::size_t file = find(name);
  if (!files_.empty()) return files_[file].flat(name);
  const Tensor& tensor = in_memory_.at(name);
  return view(static_cast<const void*>(tensor.data), tensor.dtype, {tensor.elements()});
}

std::string TensorStore::file_of(const std::string& name) const {
  const auto found = files_of_.find(name);
  return found == files_of_.end() || files_.empty() ? folder_ : files_[found->second].path();
}

std::vector<std::string> TensorStore::names() const {
  std::vector<std::string> result;
  result.reserve(files_of_.size());
  for (const auto& [name, file] : files_of_) result.push_back(name);
  return result;
}

std::vector<std::pair<std::string, const SafetensorsFile*>> TensorStore::unnamed_from(
    const std::string& start) const {
  std::vector<std::pair<std::string, const SafetensorsFile*>> result;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (std::string& name : files_[i].names()) {
      if (!name.starts_with(start)) continue;
      const auto found = files_of_.find(name);
      if (found == files_of_.end() || found->second != i) {
        result.emplace_back(std::move(name), &files_[i]);
      }
    }
  }
  return result;
}

std::vector<std::string> TensorStore::names_from(const std::string& start) const {
  std::vector<std::string> result;
  for (auto at = files_of_.lower_bound(start);
       at != files_of_.end() && at->first.starts_with(start); ++at) {
    result.push_back(at->first);
  }
  return result;
}

}  // namespace shunt
