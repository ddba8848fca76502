// The table that each instruction set fills with its kernels of activation. Included by files that
// are compiled for one set: plain types only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/form.hpp"

namespace shunt::cpu_engine {

// ActivationSpec as a kernel takes it; the kinds are numbered as Activation is.
struct ActivationRule {
  enum Kind : std::int32_t { identity, relu, relu2, silu, gelu, gelu_tanh, situ };
  Kind kind = silu;
  bool gated = true;
  bool limit_output = false;  // the limit is on act(gate), not on gate
  float alpha = 1;
  float limit = __builtin_inff();  // none
  float up_offset = 0;
  // situ's, each with its inverse.
  float beta = 1, inverse_beta = 1;
  float linear_beta = 0, inverse_linear_beta = 0;  // 0: up stays
};

struct ActivateKernels {
  // out[i] = h(gate[i], up[i]) for i < n. gate is not read unless the rule is gated. out may be
  // gate or up when it has the same form.
  void (*row)(const ActivationRule& rule, const void* gate, Form gate_form, const void* up,
              Form up_form, void* out, Form out_form, std::size_t n);
  // The epilogue of a GEMM: `rows` rows of 64 sums, f32, in blocks of 16 columns. Gated: blocks of
  // gate and of up take turns, and block pair j makes columns 16 j .. 16 j + 15 of out. Not gated:
  // every block is up's. `columns` of out are written a row, starting at element `first`.
  void (*tile)(const ActivationRule& rule, const float* sums, std::size_t rows, void* const* out,
               Form out_form, std::size_t first, std::size_t columns);
};

namespace scalar {
extern const ActivateKernels activate_kernels;
}
namespace avx2 {
extern const ActivateKernels activate_kernels;
}
namespace avx512 {
extern const ActivateKernels activate_kernels;
}

}  // namespace shunt::cpu_engine
