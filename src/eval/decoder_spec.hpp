// What surrounds the MoE layers in a decoder-only language model, as far as Shunt computes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shunt/checkpoint.hpp"

namespace shunt {

//   x = embedding[token]
//   a layer:  x += out_proj(attention(rope(norm(q)), rope(norm(k)), v)), q, k, v of norm(x)
//             x += MoE(norm(x))
//   logits = head(norm(x))
// Every norm is RMSNorm. Query head h attends with key head h / (heads / key_heads), scaled by
// 1 / sqrt(head_dim), to positions (i - sliding_window, i].
struct DecoderSpec {
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;
  std::int64_t head_dim = 0;
  int layers = 0;
  int heads = 0;
  int key_heads = 0;
  float epsilon = 1e-6f;
  float rope_theta = 10000;
  bool head_norm = false;           // q and k are normalised, a head at a time: Qwen3
  bool qkv_bias = false;            // Qwen2
  bool output_bias = false;         // of out_proj
  bool tied = false;                // the head is the embedding
  std::int64_t sliding_window = 0;  // 0: none
  std::int64_t max_positions = 0;
  bool operator==(const DecoderSpec&) const = default;
};

// Families whose attention is computed, sorted.
std::vector<std::string> decoder_families();

// Reads the checkpoint's config.json. Throws Error{unsupported} by name for a family whose
// attention is not computed, for dense layers, and for a kind of rotary embedding or of attention
// other than the plain ones; Error{bad_file} for malformed fields.
DecoderSpec decoder_spec(const Checkpoint& checkpoint);

}  // namespace shunt
