// activate: the nonlinearity between an expert's two GEMMs.
#pragma once

#include <cstdint>
#include <string>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/quantise.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

enum class Activation : std::int32_t {
  identity = 0,
  relu = 1,
  relu2 = 2,      // max(x, 0)^2
  silu = 3,       // x * sigmoid(alpha x)
  gelu = 4,       // x * Phi(x), with erf
  gelu_tanh = 5,  // its tanh approximation
  situ = 6,       // beta tanh(x / beta) * sigmoid(x): Kimi K3
};
enum class LimitOn : std::int32_t {
  input = 0,   // act(min(gate, limit)): gpt-oss, DeepSeek-V4
  output = 1,  // min(act(gate), limit): Step-3.5's SwiGLU-step
};

//   gated:     h = act(gate) * (clamp(up, -limit, limit) + up_offset)
//   not gated: h = act(up), limited like a gate
// With a linear_beta, up becomes linear_beta tanh(up / linear_beta) once it is clamped.
// SwiGLU is the default; gpt-oss is {.alpha = 1.702f, .limit = 7, .up_offset = 1}; GeGLU is
// {.kind = Activation::gelu}; Kimi K3 is {.kind = Activation::situ, .beta = 4, .linear_beta = 25}.
struct ActivationSpec {
  Activation kind = Activation::silu;
  bool gated = true;
  float alpha = 1;  // silu's; > 0
  float limit = 0;  // 0: none; else > 0. The gate is limited from above only
  LimitOn limit_on = LimitOn::input;
  float up_offset = 0;
  float beta = 1;         // situ's; 1e-6 to 1e6. Others: 1 or 0
  float linear_beta = 0;  // situ's, gated; 0: none; else 1e-6 to 1e6
  bool operator==(const ActivationSpec&) const = default;
};

// Written and read back whole. Throws Error{invalid_argument} for keys that are not known, and for
// what is no such object.
std::string to_json(const ActivationSpec& spec);
ActivationSpec activation_spec_from_json(const std::string& json);
std::string describe(const ActivationSpec& spec);  // "SwiGLU", "clamped SwiGLU (alpha 1.702, ..)"

Support supports(const ActivationSpec& spec, Device device);

// gate, up [R, I] and out [R, I], f32 | bf16 | f16, rows may be strided; gate is absent iff the
// spec is not gated. Computed in f32; f16 saturates. `rows` ([1] i32, optional): rows at or past it
// are left alone. out may be gate or up (the same view), else must not overlap them.
void activate(const Context& context, const ActivationSpec& spec, Tensor gate, Tensor up,
              Tensor out, Tensor rows = {});
// The same with out f8_e4m3 [R, I] and scales f32, [R] for Quantise::row or [R, ceil(I / 128)] for
// block_128, with any strides: the f32 results are rounded once, as quantise.hpp says. out is
// neither gate nor up, nor overlaps them. Throws Error for quantise none too.
void activate(const Context& context, const ActivationSpec& spec, const QuantiseSpec& quantise,
              Tensor gate, Tensor up, Tensor out, Tensor scales, Tensor rows = {});

}  // namespace shunt
