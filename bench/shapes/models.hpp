// The MoE layers of published models, by name: what `shunt bench --model NAME` runs.
#pragma once

#include <string>
#include <vector>

#include "shunt/layer.hpp"

namespace shunt::bench {

struct Model {
  std::string name;   // "qwen3-30b-a3b"
  std::string title;  // "Qwen3-30B-A3B"
  int moe_layers = 0;
  LayerSpec spec;  // of one of them
};

// In the order of the families.
const std::vector<Model>& models();
// Case and punctuation do not matter: "Qwen3-30B-A3B" is "qwen3-30b-a3b". Null when there is none.
const Model* find_model(const std::string& name);
// A softmax router that renormalises and SwiGLU experts: where shapes are given without a model.
LayerSpec plain_layer(std::int64_t hidden, std::int64_t intermediate, int experts, int top_k);

}  // namespace shunt::bench
