// The inputs of each expert's matrices in one MoE layer, from hidden states that entered it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "prune/statistics.hpp"
#include "shunt/context.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Whether calibrate() knows the inputs of a layer's experts: not where something stands between
// hidden states and experts (a latent projection, a norm, the weight on the input).
Support supports_calibration(const LayerSpec& spec);

class LayerCalibration {
 public:
  // Routes hidden [T, H] (f32 | bf16 | f16, on the host) by the layer's own router; token_ids as
  // LayerInputs has them. Keeps views of `weights`, `hidden` and the CPU context. Throws Error for
  // what supports_calibration() refuses, and for weights without a router.
  LayerCalibration(const Context& context, const LayerSpec& spec, const LayerWeights& weights,
                   const Tensor& hidden, const Tensor& token_ids = {});

  std::int64_t tokens(int expert) const;  // routed to it
  struct Inputs {
    InputStatistics gate_up;  // of the tokens routed to the expert, [R, H]
    InputStatistics down;     // of act(gate x, up x), [R, I], by the matrices given
  };
  // gate (absent when the activation is not gated) and up: [I, H] plain floats, normally the
  // layer's own. `products`: for obs. Throws Error for matrices of another shape.
  Inputs inputs(int expert, const Tensor& gate, const Tensor& up, bool products) const;

 private:
  Context context_;
  LayerSpec spec_;
  LayerWeights weights_;
  Tensor hidden_;
  std::vector<std::vector<std::int32_t>> tokens_;  // of each expert, ascending
};

}  // namespace shunt
