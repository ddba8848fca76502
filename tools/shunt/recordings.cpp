#include "recordings.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "core/convert.hpp"
#include "shunt/error.hpp"

namespace shunt::tool {

namespace {

// The first number among the parts of a name: "model.layers.12.mlp" -> 12.
std::optional<int> layer_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (!part.empty() && part.size() < 7 &&
        part.find_first_not_of("0123456789") == std::string::npos) {
      return std::stoi(part);
    }
    begin = end + 1;
  }
  return {};
}

bool has_prefix(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}
bool has_suffix(const std::string& text, const std::string& suffix) {
  return text.size() >= suffix.size() &&
         text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

bool is_integer(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }

std::int64_t integer_at(const Tensor& tensor, std::int64_t i) {
  return tensor.dtype == DType::i64 ? tensor.as<const std::int64_t>()[i]
                                    : tensor.as<const std::int32_t>()[i];
}

// [.., n] as [T, n]; unchanged when it is not that.
Tensor flattened(const Tensor& tensor) {
  if (tensor.rank < 2 || !tensor.contiguous()) return tensor;
  const std::int64_t last = tensor.shape[static_cast<std::size_t>(tensor.rank - 1)];
  return view(tensor.data, tensor.dtype, {last > 0 ? tensor.elements() / last : 0, last});
}

bool is_matrix(const Tensor& tensor, std::int64_t rows, std::int64_t columns) {
  return tensor.rank == 2 && tensor.shape[0] == rows && tensor.shape[1] == columns;
}

// The router's outputs stand under the block's name, in no agreed order: told apart by shape.
void find_router_outputs(const SafetensorsFile& file, const RouteSpec& route, Recording& found) {
  const std::int64_t tokens = found.input.shape[0];
  for (const auto& name : file.names()) {
    if (!has_prefix(name, found.prefix + ".")) continue;
    const Tensor tensor = flattened(file.get(name));
    if (!found.ids && is_integer(tensor.dtype) && is_matrix(tensor, tokens, route.top_k)) {
      found.ids = tensor;
    } else if (is_float(tensor.dtype) && is_matrix(tensor, tokens, route.experts) &&
               name != found.prefix + ".input" && name.find(".output") == std::string::npos) {
      if (!found.scores) found.scores = tensor;
    }
  }
}

// What a name of an input or output stands under: "model.layers.0.mlp". Empty for other names.
std::string prefix_of(const std::string& name) {
  for (const char* suffix : {".input", ".output", ".output.0"}) {
    if (has_suffix(name, suffix)) return name.substr(0, name.size() - std::strlen(suffix));
  }
  return {};
}

// Of a block that returns several tensors the first; empty where there is none.
std::string output_of(const SafetensorsFile& file, const std::string& prefix) {
  for (const char* suffix : {".output", ".output.0"}) {
    if (file.contains(prefix + suffix)) return prefix + suffix;
  }
  return {};
}

}  // namespace

Tensor without_f64(const Tensor& matrix, Rounded& memory) {
  if (matrix.dtype != DType::f64) return matrix;
  const auto* values = matrix.as<const double>();
  auto rounded = std::make_shared<std::vector<float>>();
  rounded->reserve(1);  // an empty tensor still wants an address
  rounded->assign(values, values + matrix.elements());
  memory = rounded;
  return view(rounded->data(), {matrix.shape[0], matrix.shape[1]});
}

std::string recording_file(const std::string& folder) {
  for (const char* name : {"activations.safetensors", "golden.safetensors"}) {
    const auto path = std::filesystem::path(folder) / name;
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path.string();
  }
  return {};
}

std::vector<Recording> find_recordings(const SafetensorsFile& file, const Checkpoint& checkpoint,
                                       std::optional<int> layer) {
  // Recorders name a block by its module or by its layer alone: the module's own name wins.
  std::map<int, std::string> prefixes;
  std::map<int, std::string> modules;
  for (const auto& entry : checkpoint.layers()) {
    if (entry.moe && (!layer || *layer == entry.index)) modules[entry.index] = entry.module;
  }
  // An input without its output, or the other way round; not of a module in the block.
  std::map<int, std::string> alone;
  for (const auto& name : file.names()) {
    const std::string prefix = prefix_of(name);
    const auto index = layer_of(prefix);
    if (!index || modules.count(*index) == 0) continue;
    if (!file.contains(prefix + ".input") || output_of(file, prefix).empty()) {
      if (prefix.rfind(modules[*index] + ".", 0) != 0) alone[*index] = name;
      continue;
    }
    std::string& known = prefixes[*index];
    if (known.empty() || prefix == modules[*index]) known = prefix;
  }
  for (const auto& [index, name] : alone) {
    if (prefixes.count(index) > 0) continue;
    const bool input = has_suffix(name, ".input");
    throw Error(Status::bad_file,
                fmt::format("{}: layer {} has an {} '{}' but no {}: must have both, or neither",
                            file.path(), index, input ? "input" : "output", name,
                            input ? "output" : "input"));
  }

  std::vector<Recording> found;
  for (const auto& [index, prefix] : prefixes) {
    Recording recording;
    recording.layer = index;
    recording.prefix = prefix;
    recording.input = flattened(file.get(prefix + ".input"));
    recording.output = flattened(file.get(output_of(file, prefix)));
    const LayerSpec spec = checkpoint.spec(index);
    for (const Tensor* tensor : {&recording.input, &recording.output}) {
      if (tensor->rank != 2 || tensor->shape[1] != spec.hidden || !is_float(tensor->dtype) ||
          tensor->shape[0] != recording.input.shape[0]) {
        throw Error(Status::bad_file,
                    fmt::format("{}: '{}.{}' is {}: must be [T, {}] of a float dtype", file.path(),
                                prefix, tensor == &recording.input ? "input" : "output",
                                tensor->describe(), spec.hidden));
      }
    }
    if (recording.input.shape[0] == 0) {
      throw Error(Status::bad_file,
                  fmt::format("{}: '{}.input' is {}: has no tokens, so that nothing is compared",
                              file.path(), prefix, recording.input.describe()));
    }
    recording.input = without_f64(recording.input, recording.memory);
    find_router_outputs(file, spec.route, recording);
    for (const std::string& name :
         {prefix + ".token_ids", std::string("token_ids"), std::string("tokens")}) {
      if (!file.contains(name)) continue;
      const Tensor ids = file.get(name);
      if (is_integer(ids.dtype) && ids.contiguous() && ids.elements() == recording.input.shape[0]) {
        recording.token_ids = view(ids.data, ids.dtype, {ids.elements()});
        break;
      }
    }
    found.push_back(recording);
  }
  return found;
}

Comparison compare(const Recording& recording, const LayerSpec& spec, Tensor output, Tensor ids) {
  Comparison result;
  double difference = 0;
  double magnitude = 0;
  const std::int64_t elements = output.elements();
  for (std::int64_t i = 0; i < elements; ++i) {
    const double theirs = load_f32(recording.output.data, recording.output.dtype, i);
    const double d = std::fabs(static_cast<double>(output.as<const float>()[i]) - theirs);
    // A NaN must not slip through a comparison.
    if (!(d <= difference))
      difference = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    magnitude = std::max(magnitude, std::fabs(theirs));
  }
  result.error = magnitude > 0 ? difference / magnitude : difference;

  const std::int64_t tokens = recording.input.shape[0];
  const std::int64_t k = spec.route.top_k;
  const std::int64_t experts = spec.route.experts;
  // Where no choice was recorded, scores that are selected by themselves tell it.
  const bool scores_decide = recording.scores && !spec.route.selection_bias && !spec.route.hashed &&
                             spec.route.groups.count == 1;
  if (!recording.ids && !scores_decide) return result;
  result.ids_known = true;
  result.ids = tokens * k;
  const auto score = [&](std::int64_t t, std::int64_t e) {
    return load_f32(recording.scores.data, recording.scores.dtype, t * experts + e);
  };
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::set<std::int64_t> theirs;
    if (recording.ids) {
      for (std::int64_t j = 0; j < k; ++j) theirs.insert(integer_at(recording.ids, t * k + j));
    } else {
      std::vector<std::int64_t> order(static_cast<std::size_t>(experts));
      std::iota(order.begin(), order.end(), std::int64_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int64_t a, std::int64_t b) { return score(t, a) > score(t, b); });
      theirs.insert(order.begin(), order.begin() + k);
    }
    std::set<std::int64_t> ours;
    for (std::int64_t j = 0; j < k; ++j) {
      ours.insert(ids.as<const std::int32_t>()[t * ids.shape[1] + j]);
    }
    std::vector<std::int64_t> extra;    // ours alone
    std::vector<std::int64_t> missing;  // theirs alone
    std::set_difference(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                        std::back_inserter(extra));
    std::set_difference(theirs.begin(), theirs.end(), ours.begin(), ours.end(),
                        std::back_inserter(missing));
    for (const auto e : extra) {
      // Experts of one score are each other's equals: which one a top-k takes is its own business.
      const bool tie =
          recording.scores && std::any_of(missing.begin(), missing.end(), [&](std::int64_t m) {
            return m >= 0 && m < experts && score(t, m) == score(t, e);
          });
      if (!tie) ++result.ids_differ;
    }
    // A duplicate among ours shows as a smaller set.
    result.ids_differ += k - static_cast<std::int64_t>(ours.size());
  }
  return result;
}

}  // namespace shunt::tool
