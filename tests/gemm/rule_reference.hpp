// A kernel's rule of activation, in double.
#pragma once

#include <cmath>

#include "activate/cpu_engine.hpp"
#include "activate/reference.hpp"

namespace shunt::test {

inline double activate(const cpu_engine::ActivationRule& rule, double gate, double up) {
  return activate_reference({.kind = static_cast<Activation>(rule.kind),
                             .gated = rule.gated,
                             .alpha = rule.alpha,
                             .limit = std::isinf(rule.limit) ? 0 : rule.limit,
                             .limit_on = rule.limit_output ? LimitOn::output : LimitOn::input,
                             .up_offset = rule.up_offset,
                             .beta = rule.beta,
                             .linear_beta = rule.linear_beta},
                            gate, up);
}

// SiTU as Kimi K3 has it, and where both of its tanh bend small numbers.
inline cpu_engine::ActivationRule situ(float beta = 4, float linear_beta = 25) {
  return cpu_engine::activation_rule(
      {.kind = Activation::situ, .beta = beta, .linear_beta = linear_beta});
}

}  // namespace shunt::test
