// Causal attention of one sequence, as two grouped GEMMs around a softmax.
#pragma once

#include <cstdint>

#include "eval/decoder_spec.hpp"
#include "shunt/context.hpp"

namespace shunt {

// Queries are taken some at a time, so that scores stay small whatever the length.
inline constexpr std::int64_t attention_block = 128;

std::size_t attention_workspace_bytes(const Context& context, const DecoderSpec& spec,
                                      std::int64_t length);

// out [length, heads * head_dim]; q, out rows of `heads` heads; k, v rows of `key_heads`, all f32
// and dense, q and k as they enter the product: normalised and rotated.
void attention(const Context& context, const DecoderSpec& spec, std::int64_t length, const float* q,
               const float* k, const float* v, float* out, Workspace workspace);

}  // namespace shunt
