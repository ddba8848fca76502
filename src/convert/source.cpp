#include "convert/source.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>

#include "checkpoint/access.hpp"
#include "core/check.hpp"
#include "layer/weights.hpp"

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
    const Tensor tensor = store.flat(name);
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

// Where the matrices of a layer's packed experts would stand in a plain checkpoint.
class PackedExperts {
 public:
  PackedExperts(const Checkpoint& checkpoint, int layer)
      : store_(CheckpointAccess::store(checkpoint)),
        prefix_(CheckpointAccess::layer_prefix(checkpoint, layer)),
        spec_(checkpoint.spec(layer)),
        layer_(layer) {
    const TensorNames& all = CheckpointAccess::model(checkpoint).plan.names;
    const int slots = spec_.route.shared.count, routed = spec_.experts.experts - slots;
    parts_.push_back({0, routed, named(all, all.experts, 0)});
    if (slots > 0) parts_.push_back({routed, slots, named(all, all.slots, routed)});
  }

  // And the tensor whose file it belongs to.
  std::pair<SourceMatrix, std::string> matrix(int expert, ExpertMatrix which,
                                              const PackedMatrix& m) const {
    SourceMatrix result{.layer = layer_, .expert = expert, .which = which, .packed = true};
    const Part& part = part_of(expert);
    result.tensor = prefix_ + numbered(name_of(part, which), expert);
    result.view = view(nullptr, DType::bf16, {m.n, m.k});
    if (part.names.form == ExpertNames::Form::each) {
      result.shape = {m.n, m.k};
      return {result, codes_of(without_weight(result.tensor))};
    }
    const bool down = which == ExpertMatrix::down, second = which == ExpertMatrix::up;
    const bool first = inner_first(part.names), interleaved = part.names.interleaved;
    const std::int64_t rows = down ? m.n : 2 * m.n;
    result.shape = {part.count, first ? m.k : rows, first ? rows : m.k};
    const std::int64_t across = first ? 1 : m.k;  // from one row to the next
    result.view.strides[0] = across * (!down && interleaved ? 2 : 1);
    result.view.strides[1] = first ? rows : 1;
    result.offset = (expert - part.first) * rows * m.k + (!second       ? 0
                                                          : interleaved ? across
                                                                        : across * m.n);
    return {result, store_.contains(result.tensor) ? result.tensor : result.tensor + "_blocks"};
  }

  // Every tensor that a matrix is made of.
  std::vector<std::string> tensors(int expert, ExpertMatrix which) const {
    const Part& part = part_of(expert);
    const std::string name = prefix_ + numbered(name_of(part, which), expert);
    const bool each = part.names.form == ExpertNames::Form::each;
    return beginning(store_, each ? without_weight(name) + "." : name);
  }

  // Tensors whose names begin so; biases are not of the matrix.
  static std::vector<std::string> beginning(const TensorStore& store, const std::string& start) {
    std::vector<std::string> result;
    for (const std::string& name : store.names_from(start)) {
      if (!name.ends_with("bias")) result.push_back(name);
    }
    return result;
  }
  static std::string without_weight(const std::string& name) {
    constexpr std::string_view ending = ".weight";
    return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : name;
  }

 private:
  // Experts that are stored one way: the routed ones, or those of shared slots.
  struct Part {
    int first = 0, count = 0;
    ExpertNames names;
  };
  const Part& part_of(int expert) const {
    return expert < parts_[0].count ? parts_[0] : parts_.back();
  }
  // The first of the alternatives that is there; `expert`: of a tensor an expert.
  ExpertNames named(const TensorNames& all, std::vector<ExpertNames> alternatives,
                    int expert) const {
    alternatives.push_back(single_experts(all));
    for (ExpertNames& names : alternatives) {
      const std::string up = prefix_ + numbered(names.up, expert);
      const bool each = names.form == ExpertNames::Form::each;
      if (each ? !codes_of(without_weight(up)).empty()
               : names.form == ExpertNames::Form::merged &&
                     (store_.contains(up) || store_.contains(up + "_blocks"))) {
        return std::move(names);
      }
    }
    fail(Status::internal, "convert: the packed experts of layer {} lie in no tensor", layer_);
  }
  static std::string numbered(std::string name, int expert) {
    const std::size_t at = name.find("{}");
    if (at != std::string::npos) name.replace(at, 2, std::to_string(expert));
    return name;
  }
  static const std::string& name_of(const Part& part, ExpertMatrix which) {
    if (which == ExpertMatrix::down) return part.names.down;
    const bool one = part.names.form == ExpertNames::Form::merged;
    return which == ExpertMatrix::gate && !one ? part.names.gate : part.names.up;
  }
  std::string codes_of(const std::string& module) const {
    for (const char* part : {".weight_packed", ".qweight", ".weight"}) {
      if (store_.contains(module + part)) return module + part;
    }
    return {};
  }
  bool inner_first(const ExpertNames& names) const {
    if (names.inner != ExpertNames::Inner::either) return names.inner == ExpertNames::Inner::first;
    const std::string up = prefix_ + names.up, down = prefix_ + names.down;
    if (!store_.contains(up) || !store_.contains(down)) return false;
    return store_.get(up).shape[2] == 2 * spec_.experts.intermediate &&
           store_.get(down).shape[2] == spec_.experts.hidden;
  }

  const TensorStore& store_;
  std::string prefix_;
  LayerSpec spec_;
  int layer_;
  std::vector<Part> parts_;
};

// Whether a packed matrix and the rounding of its inputs are made of a tensor, by what its name has
// behind the module's. Not so biases, and the scales of the cache of keys and values ("k_scale").
bool of_matrix(std::string_view part) {
  for (const char* name : {"qweight", "qzeros", "scales", "scale", "g_idx", "activation_scale"}) {
    if (part == name) return true;
  }
  return part.starts_with("weight") || part.starts_with("input_");
}

// The sizes of a packed linear layer by its tensors; none: it is plain.
std::optional<PackedModule> packed_module(const TensorStore& store, const QuantisedConfig& config,
                                          const std::string& name) {
  if (store.shape(name).size() > max_rank) return std::nullopt;  // a convolution's
  const Tensor t = store.get(name);
  const auto module = [&](std::string_view part) {
    return name.substr(0, name.size() - part.size());
  };
  if (name.ends_with(".qweight") && t.rank == 2) {
    const bool awq = config.method == "awq";
    return PackedModule{module(".qweight"), awq ? t.shape[1] * 8 : t.shape[1],
                        awq ? t.shape[0] : t.shape[0] * 8};
  }
  if (name.ends_with(".weight_packed") && t.rank == 2) {
    const std::string base = module(".weight_packed");
    if (t.dtype == DType::u8) return PackedModule{base, t.shape[0], t.shape[1] * 2};
    const std::string shape = base + ".weight_shape";
    const Tensor sizes = store.contains(shape) ? store.get(shape) : Tensor{};
    if (sizes.elements() != 2 || (sizes.dtype != DType::i64 && sizes.dtype != DType::i32)) {
      fail(Status::unsupported, "{}: tensor '{}' is {}: '{}' must say of what matrix",
           store.file_of(name), name, t.describe(), shape);
    }
    const auto size = [&](int i) {
      return sizes.dtype == DType::i64 ? sizes.as<const std::int64_t>()[i]
                                       : std::int64_t{sizes.as<const std::int32_t>()[i]};
    };
    // Four bits of a number, or eight: no more columns than words have room for.
    constexpr std::int64_t most = std::int64_t{1} << 40;
    const std::int64_t n = size(0), k = size(1);
    if (n != t.shape[0] || k < 1 || k > most || (k + 7) / 8 > t.shape[1] ||
        (k + 3) / 4 < t.shape[1]) {
      fail(Status::bad_file, "{}: tensor '{}' holds [{}, {}]: '{}' is {}", store.file_of(shape),
           shape, n, k, name, t.describe());
    }
    return PackedModule{base, n, k};
  }
  if (!name.ends_with(".weight")) return std::nullopt;
  const bool bytes = t.dtype == DType::u8 || t.dtype == DType::i8;
  if (!bytes && t.dtype != DType::f8_e4m3) return std::nullopt;
  const std::string base = module(".weight");
  if (t.rank != 2) {
    fail(Status::unsupported, "{}: tensor '{}' is {}: beside routed experts only matrices are read",
         store.file_of(name), name, t.describe());
  }
  const std::string scale =
      store.contains(base + ".weight_scale") ? base + ".weight_scale" : base + ".scale";
  // Integers of 8 bits have a scale a row, those of 4 one for 16 or 32.
  const bool whole = t.dtype == DType::f8_e4m3 || (t.dtype == DType::i8 && store.contains(scale) &&
                                                   store.get(scale).elements() <= t.shape[0]);
  return PackedModule{base, t.shape[0], whole ? t.shape[1] : t.shape[1] * 2};
}

}  // namespace

std::vector<SourceFile> source_files(
    const Checkpoint& checkpoint,
    const std::function<void(SourceMatrix&, const PackedMatrix&)>& see) {
  namespace fs = std::filesystem;
  const TensorStore& store = CheckpointAccess::store(checkpoint);
  std::map<std::string, SourceFile> files;
  const auto file_with = [&](const std::string& tensor) -> SourceFile& {
    return files[fs::path(store.file_of(tensor)).filename().string()];
  };
  for (const std::string& name : store.names()) {
    SourceFile& file = file_with(name);
    file.tensors.push_back(name);
    if (file.bytes == 0) {
      file.bytes = static_cast<std::int64_t>(fs::file_size(store.file_of(name)));
    }
  }
  for (const SafetensorsFile& file : store.files()) {
    const auto found = files.find(fs::path(file.path()).filename().string());
    if (found != files.end()) found->second.metadata = file.metadata();
  }
  const std::vector<Extent> extents = extents_of(checkpoint);
  std::set<std::string> of_experts;
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    if (!layer.moe) continue;
    const ExpertWeights experts = checkpoint.weights(layer.index).experts;
    std::optional<PackedExperts> places;
    if (is_packed(experts)) places.emplace(checkpoint, layer.index);
    const auto count = static_cast<std::size_t>(checkpoint.spec(layer.index).experts.experts);
    for (std::size_t e = 0; e < count; ++e) {
      for (int m = 0; m < expert_matrices; ++m) {
        const auto which = static_cast<ExpertMatrix>(m);
        const bool gate = which == ExpertMatrix::gate, up = which == ExpertMatrix::up;
        const std::vector<PackedMatrix>& packed = gate ? experts.packed_gate
                                                  : up ? experts.packed_up
                                                       : experts.packed_down;
        if (!packed.empty()) {  // gate and up may be, and down not
          auto [matrix, codes] = places->matrix(static_cast<int>(e), which, packed.at(e));
          if (see) see(matrix, packed[e]);
          file_with(codes).matrices.push_back(std::move(matrix));
          for (const std::string& name : places->tensors(static_cast<int>(e), which)) {
            of_experts.insert(name);
          }
          continue;
        }
        const std::vector<Tensor>& plain = gate ? experts.gate : up ? experts.up : experts.down;
        if (plain.empty() && gate) continue;
        const Tensor& view = plain.at(e);
        const Extent& extent = extent_of(extents, view);
        const Tensor whole = store.get(extent.name);
        SourceMatrix matrix{
            .layer = layer.index,
            .expert = static_cast<int>(e),
            .which = which,
            .tensor = extent.name,
            .shape = {whole.shape.begin(), whole.shape.begin() + whole.rank},
            .view = view,
            .offset = (view.as<const char>() - extent.begin) * 8 / bits(view.dtype)};
        of_experts.insert(extent.name);
        file_with(extent.name).matrices.push_back(std::move(matrix));
      }
    }
  }
  const QuantisedConfig& config = CheckpointAccess::model(checkpoint).quantised;
  for (const std::string& name : store.names()) {
    if (of_experts.contains(name)) {
      file_with(name).experts.push_back(name);
    } else if (const auto module = packed_module(store, config, name)) {
      file_with(name).modules.push_back(*module);
      const std::string start = module->module + ".";
      for (const std::string& part : store.names_from(start)) {
        if (of_matrix(part.substr(start.size()))) file_with(part).packed.push_back(part);
      }
    }
  }
  std::vector<SourceFile> result;
  for (auto& [name, file] : files) {
    file.name = name;
    file.metadata["format"] = "pt";
    result.push_back(std::move(file));
  }
  return result;
}

void merge_experts(const Checkpoint& checkpoint, std::vector<SourceFile>& files) {
  const std::vector<ExpertNames>& all = CheckpointAccess::model(checkpoint).plan.names.experts;
  const auto merged = std::find_if(all.begin(), all.end(), [](const ExpertNames& names) {
    return names.form == ExpertNames::Form::merged;
  });
  if (merged == all.end())
    fail(Status::internal, "convert: {} merges no experts", checkpoint.family());
  std::map<std::string, std::size_t> home;  // of a tensor: its file
  std::vector<std::vector<SourceMatrix>> moved(files.size());
  for (std::size_t f = 0; f < files.size(); ++f) {
    for (SourceMatrix& matrix : files[f].matrices) {
      matrix.tensor = CheckpointAccess::layer_prefix(checkpoint, matrix.layer) +
                      (matrix.which == ExpertMatrix::down ? merged->down : merged->up);
      moved[home.emplace(matrix.tensor, f).first->second].push_back(std::move(matrix));
    }
  }
  for (std::size_t f = 0; f < files.size(); ++f) {
    std::sort(moved[f].begin(), moved[f].end(), [](const SourceMatrix& a, const SourceMatrix& b) {
      return std::tie(a.layer, a.expert, a.which) < std::tie(b.layer, b.expert, b.which);
    });
    files[f].matrices = std::move(moved[f]);
  }
}

std::string expert_module(const Checkpoint& checkpoint, int layer, int expert, ExpertMatrix which) {
  const ExpertNames names = single_experts(CheckpointAccess::model(checkpoint).plan.names);
  std::string name = which == ExpertMatrix::gate ? names.gate
                     : which == ExpertMatrix::up ? names.up
                                                 : names.down;
  name.replace(name.find("{}"), 2, std::to_string(expert));
  return CheckpointAccess::layer_prefix(checkpoint, layer) + PackedExperts::without_weight(name);
}

}  // namespace shunt
