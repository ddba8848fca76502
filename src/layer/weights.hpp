// The weights of a layer: checked against its spec, and the small ones copied.
#pragma once

#include <vector>

#include "shunt/layer.hpp"

namespace shunt {

// Throws Error{invalid_argument} naming the first weight that is missing, superfluous, or of the
// wrong dtype or shape.
void check_weights(const LayerSpec& spec, const LayerWeights& weights);

// Copies of everything but the experts, dense, in memory of this object. Move only.
class HeldWeights {
 public:
  HeldWeights() = default;
  HeldWeights(const Context& context, const LayerWeights& weights);
  LayerWeights views;  // experts and shared are empty
  std::size_t bytes() const;

 private:
  std::vector<Buffer> buffers_;
};

}  // namespace shunt
