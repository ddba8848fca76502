// The layer, plain and in double: what every engine is checked against.
#pragma once

#include <cstdint>
#include <vector>

#include "shunt/layer.hpp"

namespace shunt {

// What route() makes of hidden states x [T, H]; the router's input after router_norm, [T, H].
std::vector<double> router_input_reference(const LayerSpec& spec, const LayerWeights& weights,
                                           const Tensor& x);

// y [T, H] for hidden states x [T, H] and a routing: ids and weights [T, S], S = route.slots().
// Checks nothing, rounds nothing. `spread`, if given: [T, H], by how much y changes at most, to
// first order, where every number that an expert returns changes by as much as it is.
std::vector<double> layer_reference(const LayerSpec& spec, const LayerWeights& weights,
                                    const Tensor& x, const std::int32_t* ids,
                                    const float* routing_weights,
                                    std::vector<double>* spread = nullptr);

}  // namespace shunt
