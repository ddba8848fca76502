// A shared expert as one more group of the experts' products, which every token goes to, where it
// is shaped and stored as the others are: its weights stream in the same two launches instead of
// two of their own. On Hopper, for one token whose products read all weights in one pass and add
// its rows up: others were as fast with the shared expert apart, or faster
// (docs/notes/cuda-layer.md, "One more of the experts"). Both ways read the same prepared matrices.
#pragma once

#include "layer/weights.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Whether it may be, as far as spec, options and weights go.
bool may_fold(const LayerSpec& spec, const LayerOptions& options, Device device);
bool may_fold(const LayerWeights& weights);
// Whether one token's products read their weights in one pass then.
bool folding_pays(const LayerSpec& spec, int multiprocessors);
// Both, on the context's GPU; of the weights nothing is said.
bool folds(const LayerSpec& spec, const LayerOptions& options, const Context& context);

// The spec with a shared slot in place of the shared expert.
LayerSpec folded(const LayerSpec& spec);

// The experts' matrices and behind them the shared expert's.
ExpertWeights joined(const LayerWeights& weights);

}  // namespace shunt
