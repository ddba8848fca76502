// A small language model whole: embedding, attention, MoE layers, logits. Made to tell what a
// weight format costs, not to serve: it recomputes every window and keeps no keys.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eval/decoder_spec.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/context.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Called with the hidden states [T, H] f32 (on the host) that enter the MoE block of a layer.
using HiddenHook = std::function<void(int layer, const Tensor& hidden)>;
// Makes the MoE layer of an index; null stands for Layer(checkpoint, index, engine, options).
using LayerMaker = std::function<Layer(int layer)>;

class LanguageModel {
 public:
  // `host` computes everything but the MoE layers, in f32; `engine`, which may be the same, those.
  // Holds copies of all weights. Throws Error for what decoder_spec() refuses, tensors that do not
  // fit it, and layers that the engine does not compute.
  LanguageModel(const Checkpoint& checkpoint, const Context& host, const Context& engine,
                const LayerOptions& options, const LayerMaker& make_layer = nullptr);
  ~LanguageModel();
  LanguageModel(LanguageModel&&) noexcept;
  LanguageModel& operator=(LanguageModel&&) noexcept;

  const DecoderSpec& spec() const;
  std::size_t prepared_bytes() const;  // of the MoE layers
  // Seconds spent in MoE layers so far; on a GPU without the copies of rows to it and back.
  double moe_seconds() const;

  // logits [T, vocabulary] f32 of sequences that lie behind one another in `tokens`; each starts at
  // position 0 and sees only itself. The same tokens give the same bits in any batch and for any
  // number of threads; on a GPU with layers that are batch_invariant. Throws
  // Error{invalid_argument} for a token outside the vocabulary, lengths that do not add up, and
  // logits of another size.
  void forward(std::span<const std::int32_t> tokens, std::span<const std::int64_t> lengths,
               std::span<float> logits, const HiddenHook& hook = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shunt
