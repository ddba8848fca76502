#include "convert/source.hpp"

#include <algorithm>
#include <filesystem>
#include <set>

#include "checkpoint/access.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

// Where a tensor lies in memory.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  std::string name;
  bool operator<(const Extent& other) const { return begin < other.begin; }
};

std::vector<Extent> extents_of(const Checkpoint& checkpoint) {
  std::vector<Extent> extents;
  const TensorStore& store = CheckpointAccess::store(checkpoint);
  for (const std::string& name : store.names()) {
    const Tensor tensor = store.get(name);
    const char* begin = tensor.as<const char>();
    if (tensor.bytes() > 0) extents.push_back({begin, begin + tensor.bytes(), name});
  }
  std::sort(extents.begin(), extents.end());
  return extents;
}

const Extent& extent_of(const std::vector<Extent>& extents, const Tensor& view) {
  const char* at = view.as<const char>();
  auto after = std::upper_bound(extents.begin(), extents.end(), Extent{at, at, {}});
  if (after == extents.begin() || at >= (after - 1)->end) {
    fail(Status::internal, "convert: an expert's matrix lies in no tensor");
  }
  return *(after - 1);
}

}  // namespace

std::vector<SourceFile> source_files(const Checkpoint& checkpoint) {
  namespace fs = std::filesystem;
  const TensorStore& store = CheckpointAccess::store(checkpoint);
  std::map<std::string, SourceFile> files;
  for (const std::string& name : store.names()) {
    const std::string path = store.file_of(name);
    SourceFile& file = files[fs::path(path).filename().string()];
    file.tensors.push_back(name);
    if (file.bytes == 0) file.bytes = static_cast<std::int64_t>(fs::file_size(path));
  }
  const std::vector<Extent> extents = extents_of(checkpoint);
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    if (!layer.moe) continue;
    const ExpertWeights experts = checkpoint.weights(layer.index).experts;
    if (!experts.packed_up.empty()) {
      fail(Status::unsupported,
           "convert: experts of layer {} are {} already: only plain ones are converted",
           layer.index, to_string(experts.packed_up[0].format));
    }
    for (std::size_t e = 0; e < experts.up.size(); ++e) {
      for (int m = 0; m < expert_matrices; ++m) {
        const auto which = static_cast<ExpertMatrix>(m);
        const std::vector<Tensor>& list = which == ExpertMatrix::gate ? experts.gate
                                          : which == ExpertMatrix::up ? experts.up
                                                                      : experts.down;
        if (list.empty()) continue;
        const Tensor& view = list[e];
        const Extent& extent = extent_of(extents, view);
        SourceMatrix matrix{
            .layer = layer.index,
            .expert = static_cast<int>(e),
            .which = which,
            .tensor = extent.name,
            .view = view,
            .offset = (view.as<const char>() - extent.begin) * 8 / bits(view.dtype)};
        files[fs::path(store.file_of(extent.name)).filename().string()].matrices.push_back(
            std::move(matrix));
      }
    }
  }
  std::vector<SourceFile> result;
  for (auto& [name, file] : files) {
    file.name = name;
    result.push_back(std::move(file));
  }
  return result;
}

std::string expert_module(const Checkpoint& checkpoint, int layer, int expert, ExpertMatrix which) {
  constexpr std::string_view ending = ".weight";
  for (const ExpertNames& names : CheckpointAccess::model(checkpoint).plan.names.experts) {
    if (names.form != ExpertNames::Form::each) continue;
    std::string name = which == ExpertMatrix::gate ? names.gate
                       : which == ExpertMatrix::up ? names.up
                                                   : names.down;
    const std::size_t at = name.find("{}");
    if (at == std::string::npos || !name.ends_with(ending)) continue;
    name.replace(at, 2, std::to_string(expert));
    name.resize(name.size() - ending.size());
    return CheckpointAccess::layer_prefix(checkpoint, layer) + name;
  }
  return {};
}

}  // namespace shunt
