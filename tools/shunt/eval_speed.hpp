// What `shunt eval --speed` times: all MoE layers of a model in bf16, one after the other.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "convert/expert.hpp"
#include "eval.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

// The experts of a layer, converted; views of memory that this owns.
struct ConvertedLayer {
  std::vector<ConvertedExpert> experts;
  LayerWeights weights;
  WeightError error;
  std::int64_t fell_back = 0;  // experts
};

class EvalSpeed {
 public:
  // What a layer is prepared from, index by the checkpoint's count.
  struct TimedLayer {
    int index = 0;
    LayerSpec spec;
    LayerOptions options;
    ConvertedLayer layer;
  };

  // The layers of the row before are forgotten; samples stay.
  void clear() { layers_.clear(); }
  void add(TimedLayer layer) { layers_.push_back(std::move(layer)); }
  // The first hidden states of the text that a layer sees: f32 [T, H] more of them.
  void sample(int layer, const Tensor& hidden);
  // Of the row, alone_us and batch_us. Every layer that was added must have been sampled.
  void time(const Context& context, EvalRow& row) const;

 private:
  std::vector<TimedLayer> layers_;
  std::map<int, std::vector<std::uint16_t>> samples_;  // bf16, by layer
};

}  // namespace shunt::tool
