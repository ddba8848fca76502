// What a Layer holds.
#pragma once

#include <vector>

#include "layer/weights.hpp"
#include "shunt/layer.hpp"

namespace shunt {

struct Layer::Impl {
  LayerSpec spec;
  LayerOptions options;
  Context context;
  HeldWeights held;
  PreparedExperts experts;
  PreparedExperts shared;
  std::vector<Buffer> latent_memory;
  PreparedWeights latent_down, latent_up;

  bool on_gpu() const { return context.device().type == DeviceType::cuda; }
  std::size_t stage_bytes(std::int64_t tokens) const;
  void check_call(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const;
  void run(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
           std::vector<StageTime>* times) const;
};

}  // namespace shunt
