// route: which experts a token goes to, and with what weights.
//
//   l = logit_scale x W^T + b_router    logits [T, E], f32 sums
//   l = cap * tanh(l / cap)         soft cap
//   p = score(l)                    softmax over E, sigmoid, sqrt(softplus), or l itself
//   q = p + b_selection             what selection compares; nothing else uses it
//   groups: rank each group of E/count consecutive experts by the max or the sum of the two best q
//           in it, keep the best `keep`; q of the others is -inf
//   ids = the k best q, best first, ties to the lower id; at most `limit` of a group
//   w = p[ids]                      unbiased, or score(l[ids]) when the score comes after the top-k
//   w = w / (sum w + eps)           renormalise; 0 where that divides by 0
//   w = w * scale * per_expert_scale[ids]
//   shared slots: ids E, E+1, .. appended to each row, with weights by SharedWeight
//
// Every score grows with l. Without a selection bias the order of q is therefore that of l, and
// selection compares l itself: a p that has saturated or underflowed makes no ties. With the score
// after the top-k, q = l + b_selection.
//
// Every published rule is a point of this space: docs/routing-rules.md lists them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

enum class Score : std::int32_t {
  none = 0,           // p = l
  softmax = 1,        // over the E experts; over the k selected logits when after the top-k
  sigmoid = 2,        // 1 / (1 + exp(-l))
  sqrt_softplus = 3,  // sqrt(log(1 + exp(l))), DeepSeek-V4
  // Phi-3.5-MoE (arXiv:2409.12136): k rounds; a round takes the best l not yet taken, call it max,
  // and weighs it by its softmax over the experts j not yet taken with
  // (max - l_j) / max(|l_j|, max) <= 2 jitter.
  sparsemixer = 4,
};
enum class ScoreStage : std::int32_t { before_top_k = 0, after_top_k = 1 };
enum class GroupRank : std::int32_t { max = 0, sum_of_top_2 = 1 };
enum class EpsilonRule : std::int32_t {
  added = 0,  // w / (sum w + eps), DeepSeek-V3
  floor = 1,  // w / max(sum w, eps), ERNIE 4.5
};
// The weight of a shared expert that rides along as ids E, E+1, ..
enum class SharedWeight : std::int32_t {
  one = 0,
  inverse_scale = 1,   // 1 / scale: where the caller scales the whole output by `scale`
  sum_over_scale = 2,  // (sum of the selected p) / scale; renormalisation changes neither
  sigmoid_gate = 3,    // sigmoid(shared_logits[t, i]), Qwen2-MoE and Qwen3-Next
  // The router has a row for each shared expert too (logits [T, E + count]); they are never
  // selected but weighed like the others, p / (sum over selected and shared of p + eps): Inkling.
  // Needs renormalize, and the score sigmoid or sqrt_softplus.
  joint = 4,
};

struct Groups {
  int count = 1;  // groups of experts / count consecutive experts; up to 64, divides experts
  int keep = 1;   // groups that stay eligible
  GroupRank rank_by = GroupRank::max;
  int limit = 0;  // experts of one group that are chosen at most; 0: any number
  bool operator==(const Groups&) const = default;
};

struct SharedSlots {
  int count = 0;  // up to 64
  SharedWeight weight = SharedWeight::one;
  bool operator==(const SharedSlots&) const = default;
};

struct RouteSpec {
  int experts = 0;  // E, 1 .. 4096, zero-compute experts included
  int top_k = 0;    // k, 1 .. min(64, E)
  Score score = Score::softmax;
  ScoreStage score_stage = ScoreStage::before_top_k;
  float logit_scale = 1;        // logits *= logit_scale, before the bias; > 0
  bool router_bias = false;     // logits += router_bias [E]
  float soft_cap = 0;           // 0: none; else > 0
  bool selection_bias = false;  // q = p + selection_bias [E]
  Groups groups{};
  bool renormalize = false;
  float renormalize_epsilon = 1e-20f;
  EpsilonRule epsilon_rule = EpsilonRule::added;
  float scale = 1;                // routed scaling factor, finite, > 0; applied exactly once
  bool scale_in_weights = true;   // false: the caller scales the routed output by `scale` itself
  bool per_expert_scale = false;  // w *= per_expert_scale[id], Gemma 4
  bool hashed = false;            // ids = hash_table[token_id], DeepSeek-V4; weights as ever
  float jitter = 0;               // sparsemixer's
  SharedSlots shared{};
  bool weight_on_input = false;  // the weight multiplies x, not the expert's output: Llama 4
  // A token's bits do not depend on the number of others: a GPU takes one form for all.
  bool batch_invariant = false;

  bool operator==(const RouteSpec&) const = default;
  int slots() const { return top_k + shared.count; }  // ids a token gets
  // C: columns of the logits, rows of the router
  int columns() const {
    return shared.weight == SharedWeight::joint ? experts + shared.count : experts;
  }
};

// Compact JSON with every field, and its reverse. from_json refuses an unknown key, a missing
// `experts` or `top_k`, and any value that is not legal, by name.
std::string to_json(const RouteSpec& spec);
RouteSpec route_spec_from_json(const std::string& json);
// The rule in words, one line.
std::string describe(const RouteSpec& spec);

// Logits, or hidden states and the router's weights. T = rows, C = spec.columns(). All on the
// context's device. The last stride of a matrix must be 1, its rows may be strided.
struct RouteInputs {
  Tensor logits{};            // [T, C] f32 | bf16 | f16
  Tensor hidden{};            // [T, H] f32 | bf16 | f16, never rounded
  Tensor router_weight{};     // [C, H] f32 | bf16 | f16
  Tensor router_bias{};       // [C] f32 | bf16 | f16; iff spec.router_bias
  Tensor selection_bias{};    // [E] f32 | bf16 | f16; iff spec.selection_bias
  Tensor per_expert_scale{};  // [C] f32 | bf16 | f16; iff spec.per_expert_scale
  Tensor token_ids{};         // [T] i32 | i64; iff spec.hashed
  Tensor hash_table{};        // [V, k] i32 | i64, values in [0, E); iff spec.hashed
  Tensor shared_logits{};     // [T, shared.count] f32; iff SharedWeight::sigmoid_gate
  Tensor valid_tokens{};      // [1] i32, optional; below 0 it counts as 0, above T as T
};

// Any subset, at least one. S = spec.slots(). Rows may be strided, apart from the inputs. Rows at
// or past valid_tokens get ids -1 and zeros.
struct RouteOutputs {
  Tensor ids{};      // [T, S] i32, best first (hashed: as the table has them), then shared slots
  Tensor weights{};  // [T, S] f32
  Tensor dense{};    // [T, E + shared.count] f32: weights at their experts, 0 elsewhere
  Tensor logits{};   // [T, C] f32: logits with bias and soft cap, as selection saw them
  Tensor replay{};   // [T, k] i16: the selected experts alone, to be replayed in training
};

// NaN and -inf in logits (or in q) count as -FLT_MAX and +inf as FLT_MAX, so that ids are always
// k different ones in [0, E) and weights are finite. (A hash table's ids are taken as they are: a
// repeated one stays, and its weights add up in `dense`.)
//
// From the same logits the same build gives the same bits on every instruction set, and the CUDA
// engine gives the CPU engine's. A logit's sum over H has a fixed order of its own, on the CPU
// whatever T, the other rows and the number of threads; on CUDA the order follows from H, C and the
// number of tokens that the call is given (run after run it is the same). There, operands of two
// 16-bit types or of f32 are split into bf16 pieces, so that logits are f32-grade.
//
// On CUDA nobody looks at a hash table on the host: a token id or an entry out of range gives the
// id -1 and the weight 0.
Support supports(const RouteSpec& spec, Device device);
// Bytes of workspace for up to `tokens` tokens of width `hidden` (0: from logits). Throws Error for
// a spec that supports() refuses.
std::size_t route_workspace_bytes(const Context& context, const RouteSpec& spec,
                                  std::int64_t tokens, std::int64_t hidden);
// Throws Error for a spec that supports() refuses, a missing, superfluous or misshapen tensor, a
// workspace too small, and (CPU) token ids or hash table entries out of range.
void route(const Context& context, const RouteSpec& spec, const RouteInputs& in,
           const RouteOutputs& out, Workspace workspace);

}  // namespace shunt
