// Checkpoints: config.json and safetensors of a model family, read as LayerSpecs and weights.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "shunt/error.hpp"
#include "shunt/layer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {

struct CheckpointLayer {
  int index = 0;
  bool moe = false;
  std::string note;    // why a layer is not MoE, in a few words; else empty
  std::string module;  // of the MoE block, as tensors and recordings name it: model.layers.0.mlp
};

// A folder with config.json and model.safetensors, or model.safetensors.index.json and its shards.
// Copies share what is mapped; any number of threads may use one at once.
class Checkpoint {
 public:
  // Throws Error: unknown family, a field of experts, routing or activation that is not understood,
  // a malformed or missing file; always by name.
  static Checkpoint open(const std::string& folder);

  const std::string& folder() const;
  const std::string& family() const;      // model_type of the text model: "qwen3_moe"
  const std::string& model_name() const;  // the architecture's name, for people
  std::string summary() const;            // family, rule and shapes in a few words
  const std::vector<CheckpointLayer>& layers() const;
  int first_moe_layer() const;  // -1: none

  // Throws Error{invalid_argument} for a layer out of range or without MoE.
  LayerSpec spec(int layer) const;
  // Views of the mapped files; they live as long as any copy of this object. Every shape is checked
  // against the spec. Quantised experts are in ExpertWeights.packed_*, whatever dialect they are
  // stored in (docs/formats.md); what has to be put in another order for that lies in memory of its
  // own. Throws Error{unsupported} for a dialect that is not read.
  LayerWeights weights(int layer) const;

  // All tensors, over all shards.
  std::vector<std::string> tensor_names() const;
  bool contains(const std::string& name) const;
  Tensor tensor(const std::string& name) const;  // throws Error{bad_file} when it is not there

 private:
  friend struct CheckpointAccess;
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// model_types that open() understands, sorted.
std::vector<std::string> known_families();
// The spec of one MoE layer from the text of a config.json alone, without weights. Throws Error as
// open() and spec() do.
LayerSpec layer_spec_from_config(const std::string& config_json, int layer);

}  // namespace shunt
