// From tensor names to the weights of a layer.
#pragma once

#include <string>

#include "checkpoint/family.hpp"
#include "checkpoint/quantised.hpp"
#include "checkpoint/tensor_store.hpp"

namespace shunt {

// Views of the weights of one layer, whose tensors' names begin with `prefix`
// ("model.layers.7."). Throws Error{bad_file} naming the first tensor that is missing or of a shape
// that `spec` does not have, Error{unsupported} for one of a dtype or dialect that is not read.
// Without `fill` memory that is taken for packed matrices holds nothing yet.
LayerWeights read_weights(const TensorStore& store, const TensorNames& names,
                          const QuantisedConfig& quantised, const LayerSpec& spec,
                          const std::string& prefix, bool fill);

}  // namespace shunt
