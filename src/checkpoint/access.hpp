// What a Checkpoint knows and does not tell its users: for the rooms of the library.
#pragma once

#include <string>

#include "checkpoint/model.hpp"
#include "checkpoint/tensor_store.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {

struct CheckpointAccess {
  static const Model& model(const Checkpoint& checkpoint);
  static const TensorStore& store(const Checkpoint& checkpoint);
  // What the names of a layer's tensors begin with: "model.layers.7.".
  static std::string layer_prefix(const Checkpoint& checkpoint, int layer);
  // Checkpoint::weights() for formats and sizes alone: what has memory of its own is not filled.
  static LayerWeights unfilled_weights(const Checkpoint& checkpoint, int layer);
};

}  // namespace shunt
