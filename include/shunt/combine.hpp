// combine: expert rows back into tokens, a weighted sum in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

//   y[t] = sum over slots s = 0 .. S-1 of w[t, s] * row(t, s)  [+ g[t] * shared[t]] [+ residual[t]]
//   g[t] = shared_scale * sigmoid(shared_gate[t]), or shared_scale
// row(t, s) is rows[inverse[t, s]]; a pair with inverse -1 adds nothing, unless its id is in
// [identity_from, identity_until): a zero-compute expert, whose row is the token's own hidden state
// (LongCat), weighted whatever `weighted` says.
struct CombineSpec {
  int slots = 0;         // S, 1 .. 128
  bool weighted = true;  // false: w = 1 (weights were on the input, or in the rows already)
  std::int32_t identity_from = -1;  // -1: no zero-compute experts
  std::int32_t identity_until = 0;  // 0: no end; else above identity_from
  bool shared_gate = false;         // g has the sigmoid
  float shared_scale = 1;           // finite
  bool operator==(const CombineSpec&) const = default;
};
// Compact JSON with every field, and its reverse, which refuses unknown keys and illegal values.
std::string to_json(const CombineSpec& spec);
CombineSpec combine_spec_from_json(const std::string& json);

struct CombineInputs {
  Tensor rows{};          // [N, H] f32 | bf16 | f16, expert order (compact or padded)
  Tensor inverse{};       // [T, S] i32, dense: inverse or padded_inverse of order
  Tensor weights{};       // [T, S] f32, dense; iff weighted, or identity_from >= 0
  Tensor ids{};           // [T, S] i32, dense; iff identity_from >= 0
  Tensor hidden{};        // [T, H]; iff identity_from >= 0
  Tensor shared{};        // [T, H] f32 | bf16 | f16; optional unless shared_gate or shared_scale
  Tensor shared_gate{};   // [T] f32 logits; iff spec.shared_gate
  Tensor residual{};      // [T, H], optional
  Tensor valid_tokens{};  // [1] i32, optional: rows at or past it are written as 0
};

Support supports(const CombineSpec& spec, Device device);
// out [T, H] f32 | bf16 | f16; rows of every [., H] tensor may be strided. f32 sums, slots first to
// last, then the shared expert, then the residual; f16 saturates. The bits depend on neither the
// batch nor the number of threads. out may be hidden, shared or residual itself (the same view),
// and overlaps nothing that is read otherwise. No workspace. Throws Error for bad shapes, and
// (CPU) an inverse at or past N.
void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out);

}  // namespace shunt
