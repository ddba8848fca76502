// What another implementation computed in the MoE blocks of a checkpoint, and how far we are off.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::tool {

// Hidden states as engines take them: f64 as f32, rounded into memory that `memory` then keeps.
using Rounded = std::shared_ptr<const std::vector<float>>;
Tensor without_f64(const Tensor& matrix, Rounded& memory);

// One layer as recorded. Tensors are views of the file, but for an input in f64.
struct Recording {
  int layer = 0;
  std::string prefix;  // of its tensors: "model.layers.0.mlp"
  Tensor input;        // [T, H]
  Tensor output;       // [T, H]
  Tensor ids;          // [T, k] i32 | i64, or not recorded
  Tensor scores;       // [T, E] scores or logits, or not recorded
  Tensor token_ids;    // [T], or not recorded
  Rounded memory;
};

// DIR/activations.safetensors or DIR/golden.safetensors; empty when there is neither.
std::string recording_file(const std::string& folder);

// The MoE layers that `file` has an input and an output for, in order; `layer` picks one. Throws
// Error{bad_file} for a layer of which one of the two alone is there, and for no tokens.
std::vector<Recording> find_recordings(const SafetensorsFile& file, const Checkpoint& checkpoint,
                                       std::optional<int> layer);

struct Comparison {
  double error = 0;        // max |ours - recorded| / max |recorded|
  bool ids_known = false;  // recorded, directly or as the nonzero scores
  std::int64_t ids = 0;
  std::int64_t ids_differ = 0;  // not counting those that differ only between equal scores
  bool pass(double tolerance) const { return error <= tolerance && ids_differ == 0; }
};
// output [T, H] f32; ids [T, slots] i32, of which the first k are compared as a set: recordings
// often hold them in no particular order.
Comparison compare(const Recording& recording, const LayerSpec& spec, Tensor output, Tensor ids);

}  // namespace shunt::tool
