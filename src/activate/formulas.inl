// The nonlinearities themselves, on the vectors of the simd_*.hpp and the functions of simd_math.hpp
// that were included before: the same formulas on every set and on the GPU.
//
//   gated:     h = act(gate) * (u + up_offset), u = clamp(up, -limit, limit), situ's then bent:
//              linear_beta tanh(u / linear_beta)
//   not gated: h = act(up)
// with act's argument or result limited from above. About 30 operations a vector, one exp and one
// division; situ has three of each, up's included.

struct Constants {
  SHUNT_INLINE explicit Constants(const ActivationRule& rule)
      : alpha(set1(rule.alpha)),
        // No limit on a side is an infinite one.
        input_limit(set1(rule.limit_output ? __builtin_inff() : rule.limit)),
        output_limit(set1(rule.limit_output ? rule.limit : __builtin_inff())),
        limit(set1(rule.limit)),
        minus_limit(set1(-rule.limit)),
        up_offset(set1(rule.up_offset)),
        beta(set1(rule.beta)),
        inverse_beta(set1(rule.inverse_beta)),
        linear_beta(set1(rule.linear_beta)),
        inverse_linear_beta(set1(rule.inverse_linear_beta)),
        bends_up(rule.linear_beta != 0) {}
  F32 alpha, input_limit, output_limit, limit, minus_limit, up_offset;
  F32 beta, inverse_beta, linear_beta, inverse_linear_beta;
  bool bends_up;
};

template <ActivationRule::Kind kind>
SHUNT_INLINE F32 act(const Constants& c, F32 x) {
  switch (kind) {
    case ActivationRule::identity:
      return x;
    case ActivationRule::relu:
      return max(zero(), x);
    case ActivationRule::relu2:
      return mul(max(zero(), x), max(zero(), x));
    case ActivationRule::silu:
      return mul_sigmoid(x, mul(c.alpha, x));
    case ActivationRule::gelu:
      return gelu(x);
    case ActivationRule::gelu_tanh:
      return gelu_tanh(x);
    case ActivationRule::situ:
      break;
  }
  return mul_sigmoid(mul(c.beta, tanh(mul(c.inverse_beta, x))), x);
}

// The order of min's and max's operands lets a NaN through.
template <ActivationRule::Kind kind, bool gated>
SHUNT_INLINE F32 activated(const Constants& c, F32 gate, F32 up) {
  const F32 x = gated ? gate : up;
  const F32 a = min(c.output_limit, act<kind>(c, min(c.input_limit, x)));
  if (!gated) return a;
  F32 u = max(c.minus_limit, min(c.limit, up));
  if (kind == ActivationRule::situ && c.bends_up) {
    u = mul(c.linear_beta, tanh(mul(c.inverse_linear_beta, u)));
  }
  return mul(a, add(u, c.up_offset));
}

// Calls run.template operator()<kind, gated>() for the rule's kind.
template <bool gated, class Run>
SHUNT_INLINE void with_kind(const ActivationRule& rule, const Run& run) {
  switch (rule.kind) {
    case ActivationRule::identity:
      return run.template go<ActivationRule::identity, gated>();
    case ActivationRule::relu:
      return run.template go<ActivationRule::relu, gated>();
    case ActivationRule::relu2:
      return run.template go<ActivationRule::relu2, gated>();
    case ActivationRule::silu:
      return run.template go<ActivationRule::silu, gated>();
    case ActivationRule::gelu:
      return run.template go<ActivationRule::gelu, gated>();
    case ActivationRule::gelu_tanh:
      return run.template go<ActivationRule::gelu_tanh, gated>();
    case ActivationRule::situ:
      return run.template go<ActivationRule::situ, gated>();
  }
}
