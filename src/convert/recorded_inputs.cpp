#include "convert/recorded_inputs.hpp"

#include <cmath>

#include "core/check.hpp"
#include "core/convert.hpp"
#include "prune/calibration.hpp"

namespace shunt {

namespace {

// States that are not finite, or none at all, would say nothing of any weight.
Tensor hidden_states(const SafetensorsFile& file, const std::string& name, std::int64_t hidden) {
  const Tensor tensor = file.get(name);
  const bool plain_float =
      tensor.dtype == DType::f32 || tensor.dtype == DType::bf16 || tensor.dtype == DType::f16;
  if (tensor.rank != 2 || tensor.shape[1] != hidden || !plain_float) {
    fail(Status::bad_file, "{}: tensor '{}' is {}: must be f32, bf16 or f16 [T, {}]", file.path(),
         name, tensor.describe(), hidden);
  }
  if (tensor.shape[0] == 0) {
    fail(Status::bad_file, "{}: tensor '{}' is {}: holds no hidden states", file.path(), name,
         tensor.describe());
  }
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    const float x = load_f32(tensor.data, tensor.dtype, i);
    if (!std::isfinite(x)) {
      fail(Status::bad_file, "{}: tensor '{}' has {} at [{}, {}]: must be finite", file.path(),
           name, x, i / hidden, i % hidden);
    }
  }
  return tensor;
}

// Of `tokens` hidden states, each a row of the hash table.
Tensor token_ids(const SafetensorsFile& file, const std::string& name, std::int64_t tokens,
                 std::int64_t vocabulary) {
  if (!file.contains(name)) {
    fail(Status::bad_file, "{}: has no tensor '{}': the layer is routed by token ids", file.path(),
         name);
  }
  const Tensor tensor = file.get(name);
  if (tensor.rank != 1 || tensor.shape[0] != tokens ||
      (tensor.dtype != DType::i32 && tensor.dtype != DType::i64)) {
    fail(Status::bad_file, "{}: tensor '{}' is {}: must be i32 or i64 [{}]", file.path(), name,
         tensor.describe(), tokens);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t id = tensor.dtype == DType::i64 ? tensor.as<const std::int64_t>()[t]
                                                       : tensor.as<const std::int32_t>()[t];
    if (id < 0 || id >= vocabulary) {
      fail(Status::bad_file, "{}: tensor '{}' has {} at [{}]: must be 0 to {}", file.path(), name,
           id, t, vocabulary - 1);
    }
  }
  return tensor;
}

}  // namespace

RecordedInputs::RecordedInputs(const std::string& path, const Checkpoint& checkpoint)
    : file_(SafetensorsFile::open(path)) {
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    if (!layer.moe) continue;
    const LayerSpec spec = checkpoint.spec(layer.index);
    require(supports_calibration(spec), "calibration");
    const std::string plain = fmt::format("layers.{}", layer.index);
    const std::string& prefix =
        !file_.contains(layer.module + ".input") && file_.contains(plain + ".input") ? plain
                                                                                     : layer.module;
    if (!file_.contains(prefix + ".input")) {
      fail(Status::bad_file,
           "{}: has no tensor '{}.input' or '{}.input': every MoE layer is "
           "calibrated",
           path, layer.module, plain);
    }
    RecordedLayer& found = layers_[layer.index];
    found.hidden = hidden_states(file_, prefix + ".input", spec.hidden);
    if (spec.route.hashed) {
      found.token_ids = token_ids(file_, prefix + ".token_ids", found.hidden.shape[0],
                                  checkpoint.weights(layer.index).hash_table.shape[0]);
    }
  }
}

}  // namespace shunt
