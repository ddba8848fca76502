#include "convert/beside.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <string_view>

#include "convert/journal.hpp"
#include "core/shown.hpp"

namespace shunt {

namespace {

namespace fs = std::filesystem;

// A model's weights in another form than safetensors, or the list of such files.
bool other_weights(const std::string& name) {
  constexpr std::string_view list = ".index.json";
  const std::string_view file =
      name.ends_with(list) ? std::string_view(name).substr(0, name.size() - list.size()) : name;
  for (const char* ending : {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}) {
    if (file.ends_with(ending)) return true;
  }
  return false;
}

// Of what is not copied: why, as far as its name does not say so itself, to stand behind it.
std::optional<std::string> stays_behind(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  std::error_code ignored;
  if (entry.is_directory(ignored)) return "/";
  if (!entry.exists(ignored)) return ", a link to nothing";
  if (!entry.is_regular_file(ignored)) return ", which is no regular file";
  if (name == journal_name) return ", whose name the journal of conversions has";
  if (name.ends_with(".safetensors") || other_weights(name)) return "";
  return std::nullopt;
}

// Tensors of a file that the index does not name, or names in another file: nobody reads them
// there. A line a file; none: "".
std::string unnamed_tensors(const TensorStore& store, const SafetensorsFile& file) {
  std::string first;
  std::size_t count = 0;
  for (const std::string& name : file.names()) {
    if (store.contains(name) && store.file_of(name) == file.path()) continue;
    if (count++ == 0) first = clean(name);
  }
  if (count == 0) return {};
  return fmt::format("tensor {}{} of {}, which the index does not name there", first,
                     count > 1 ? fmt::format(" and {} more", count - 1) : "",
                     fs::path(file.path()).filename().string());
}

}  // namespace

Beside beside_tensors(const std::string& folder, const TensorStore& store,
                      const std::set<std::string>& made) {
  Beside beside;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (made.contains(name)) continue;
    if (const auto why = stays_behind(entry)) {
      beside.left_out.push_back(clean(name) + *why);
    } else {
      check_readable(entry.path().string());
      beside.copied[name] = static_cast<std::int64_t>(entry.file_size());
    }
  }
  for (const SafetensorsFile& file : store.files()) {
    std::string unnamed = unnamed_tensors(store, file);
    if (!unnamed.empty()) beside.left_out.push_back(std::move(unnamed));
  }
  return beside;
}

}  // namespace shunt
