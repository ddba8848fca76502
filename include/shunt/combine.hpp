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
// row(t, s) is rows[inverse[t, s]]; a pair with inverse -1 adds nothing, unless its id is at or
// past `identity_from`: a zero-compute expert, whose row is the token's own hidden state (LongCat).
struct CombineSpec {
  int slots = 0;
  bool weighted = true;  // false: w = 1 (weights were on the input, or in the rows already)
  std::int32_t identity_from = -1;  // -1: no zero-compute experts
  bool shared_gate = false;         // g = sigmoid(shared_gate[t]); else g = 1
  bool operator==(const CombineSpec&) const = default;
};
std::string to_json(const CombineSpec& spec);
CombineSpec combine_spec_from_json(const std::string& json);

struct CombineInputs {
  Tensor rows{};         // [N, H] f32 | bf16 | f16, expert order (compact or padded)
  Tensor inverse{};      // [T, S] i32: inverse or padded_inverse of order
  Tensor weights{};      // [T, S] f32; iff weighted, or identity_from >= 0
  Tensor ids{};          // [T, S] i32; iff identity_from >= 0
  Tensor hidden{};       // [T, H]; iff identity_from >= 0
  Tensor shared{};       // [T, H] f32 | bf16 | f16, optional
  Tensor shared_gate{};  // [T] f32 logits; iff spec.shared_gate
  Tensor residual{};     // [T, H], optional
};

Support supports(const CombineSpec& spec, Device device);
// out [T, H] f32 | bf16 | f16, rows may be strided. f32 sums, slots first to last, then the shared
// expert, then the residual. f16 saturates. No workspace.
void combine(const Context& context, const CombineSpec& spec, const CombineInputs& in, Tensor out);

}  // namespace shunt
