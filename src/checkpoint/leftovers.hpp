// Tensors that would change what a block computes, and that config.json does not account for:
// whoever wrote them meant another model.
#pragma once

#include <string>

#include "checkpoint/family.hpp"
#include "checkpoint/tensor_store.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Of an MoE block whose layer's tensors begin with `prefix`. Throws Error{bad_file} naming the
// first of: experts under two kinds of names, what lies beside its router, gates of other tokens,
// experts beyond the last, shared experts of a block that has none, biases that are not zeros where
// it has none, and unless `quantised`, scales of weights that are plain.
void check_leftovers(const TensorStore& store, const TensorNames& names, const LayerSpec& spec,
                     const std::string& prefix, bool quantised);
// Of a layer without experts, whose config.json says `note`: a router.
void check_no_router(const TensorStore& store, const TensorNames& names, int layer,
                     const std::string& note, const std::string& prefix);

}  // namespace shunt
