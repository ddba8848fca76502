// A RouteSpec resolved into what the work on one token needs: plain data for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/form.hpp"

namespace shunt::routing {

using cpu_engine::Form;

// The score together with its stage.
enum class Weigh : int {
  logit,
  softmax_of_all,
  softmax_of_selected,
  sigmoid,
  sqrt_softplus,
  sparsemixer,
};
enum class Shared : int { constant, sum_over_scale, gate, joint };

struct Rule {
  int experts = 0;  // E
  int columns = 0;  // C: E and the shared experts that the router scores
  int top_k = 0;
  int shared_count = 0;
  int groups = 1, group_size = 0, keep = 1;
  int group_limit = 0;  // 0: none
  bool rank_by_two_best = false;
  Weigh weigh = Weigh::softmax_of_all;
  // What is compared is p, not l: it carries a bias, or ranks groups by a sum. (Without a bias the
  // experts themselves are compared by l even then.)
  bool scores_rank = false;
  Shared shared = Shared::constant;
  bool renormalize = false;
  bool epsilon_is_floor = false;
  float epsilon = 0;
  float factor = 1;           // scale, or 1 where the caller applies it
  float scale = 1;            // for the shared slots
  float shared_constant = 1;  // Shared::constant
  float logit_scale = 1;
  float soft_cap = 0;
  float twice_jitter = 0;
  const float* router_bias = nullptr;       // [C] or null
  const float* selection_bias = nullptr;    // [E] or null
  const float* per_expert_scale = nullptr;  // [C] or null

  int slots() const { return top_k + shared_count; }
};

constexpr int row_pad = 32;  // rows of scratch memory are whole blocks of this many experts
constexpr std::int64_t padded(std::int64_t columns) {
  return (columns + row_pad - 1) / row_pad * row_pad;
}

// Of one thread, for one token at a time; each [padded(C)].
struct Scratch {
  float* logits = nullptr;
  float* scores = nullptr;
  float* compared = nullptr;
  std::int64_t* keys = nullptr;
  std::int64_t* best = nullptr;  // of each block of row_pad keys
};

struct RowOutputs {
  std::int32_t* ids = nullptr;     // [slots]; any of these may be null
  float* weights = nullptr;        // [slots]
  float* dense = nullptr;          // [E + shared_count]
  float* logits = nullptr;         // [C]
  std::int16_t* replay = nullptr;  // [top_k]
};

// A matrix of f32, bf16 or f16.
struct Rows {
  const void* data = nullptr;
  Form form = Form::f32;
  std::int64_t stride = 0;  // elements from row to row
};

// What is compiled once for each instruction set.
struct Kernels {
  // values[i] = rows[row, begin + i] for i < count.
  void (*widen)(const Rows& rows, std::int64_t row, std::int64_t begin, std::int64_t count,
                float* values);
  // logits[t * stride + c] = x[first_token + t] . w[c] for t < tokens and begin <= c < end.
  void (*dots)(const Rows& x, std::int64_t first_token, std::int64_t tokens, const Rows& w,
               std::int64_t begin, std::int64_t end, std::int64_t hidden, float* logits,
               std::int64_t stride);
  // One token, whose C raw logits are in scratch.logits. `hashed`: its k ids, or null.
  void (*select)(const Rule& rule, const Scratch& scratch, const std::int32_t* hashed,
                 const float* shared_logits, const RowOutputs& out);
};

namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

// A logit is the sum over chunks of H in order; a chunk's sum runs in 16 strided lanes, which then
// fold in halves. Tiles and blocks follow from this, never the other way round.
constexpr std::int64_t chunk = 1024;
constexpr int dot_lanes = 16;
constexpr std::int64_t tile_rows = 4;    // experts that share one pass over a chunk of tokens
constexpr std::int64_t block_rows = 64;  // tokens that share one pass over the router

}  // namespace shunt::routing
