// The kernels of kernels.hpp, for the set whose simd_*.hpp was included before.
//
//   gated:     h = act(gate) * (clamp(up, -limit, limit) + up_offset)
//   not gated: h = act(up)
// with act's argument or result limited from above. About 30 operations a vector, one exp and one
// division: some 2 ns for 16 numbers, against 16 K / 1000 us for the sums that they come from.

template <ActivationRule::Kind kind>
SHUNT_INLINE F32 act(F32 x, F32 alpha) {
  switch (kind) {
    case ActivationRule::identity:
      return x;
    case ActivationRule::relu:
      return max(zero(), x);
    case ActivationRule::relu2:
      return mul(max(zero(), x), max(zero(), x));
    case ActivationRule::silu:
      return mul_sigmoid(x, mul(alpha, x));
    case ActivationRule::gelu:
      return gelu(x);
    case ActivationRule::gelu_tanh:
      return gelu_tanh(x);
  }
}

struct Constants {
  explicit Constants(const ActivationRule& rule)
      : alpha(set1(rule.alpha)),
        // No limit on a side is an infinite one.
        input_limit(set1(rule.limit_output ? __builtin_inff() : rule.limit)),
        output_limit(set1(rule.limit_output ? rule.limit : __builtin_inff())),
        limit(set1(rule.limit)),
        minus_limit(set1(-rule.limit)),
        up_offset(set1(rule.up_offset)) {}
  F32 alpha, input_limit, output_limit, limit, minus_limit, up_offset;
};

// The order of min's and max's operands lets a NaN through.
template <ActivationRule::Kind kind, bool gated>
SHUNT_INLINE F32 activated(const Constants& c, F32 gate, F32 up) {
  const F32 x = gated ? gate : up;
  const F32 a = min(c.output_limit, act<kind>(min(c.input_limit, x), c.alpha));
  if (!gated) return a;
  return mul(a, add(max(c.minus_limit, min(c.limit, up)), c.up_offset));
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
  }
}

template <class Run>
SHUNT_INLINE void with_rule(const ActivationRule& rule, const Run& run) {
  rule.gated ? with_kind<true>(rule, run) : with_kind<false>(rule, run);
}

struct Row {
  const ActivationRule& rule;
  const void* gate;
  Form gate_form;
  const void* up;
  Form up_form;
  void* out;
  Form out_form;
  std::size_t n;

  template <ActivationRule::Kind kind, bool gated>
  void go() const {
    const Constants c(rule);
    std::size_t i = 0;
    for (; i + F32::width <= n; i += F32::width) {
      const F32 g = gated ? load_row(gate, gate_form, i) : zero();
      store_row(out, out_form, i, activated<kind, gated>(c, g, load_row(up, up_form, i)));
    }
    if (i == n) return;
    const F32 g = gated ? load_row_part(gate, gate_form, i, n - i) : zero();
    const F32 u = load_row_part(up, up_form, i, n - i);
    store_row_part(out, out_form, i, n - i, activated<kind, gated>(c, g, u));
  }
};

struct Tile {
  const ActivationRule& rule;
  const float* sums;
  std::size_t rows;
  void* const* out;
  Form out_form;
  std::size_t first;
  std::size_t columns;

  template <ActivationRule::Kind kind, bool gated>
  void go() const {
    const Constants c(rule);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < columns; i += F32::width) {
        // Column i of out: lane i % 16 of its block.
        const float* up = sums + 64 * r + (gated ? i / 16 * 32 + 16 + i % 16 : i);
        const F32 g = gated ? load(up - 16) : zero();
        const F32 h = activated<kind, gated>(c, g, load(up));
        if (i + F32::width <= columns) {
          store_row(out[r], out_form, first + i, h);
        } else {
          store_row_part(out[r], out_form, first + i, columns - i, h);
        }
      }
    }
  }
};

void activate_row(const ActivationRule& rule, const void* gate, Form gate_form, const void* up,
                  Form up_form, void* out, Form out_form, std::size_t n) {
  with_rule(rule, Row{rule, gate, gate_form, up, up_form, out, out_form, n});
}

void activate_tile(const ActivationRule& rule, const float* sums, std::size_t rows,
                   void* const* out, Form out_form, std::size_t first, std::size_t columns) {
  with_rule(rule, Tile{rule, sums, rows, out, out_form, first, columns});
}
