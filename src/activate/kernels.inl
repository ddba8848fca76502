// The kernels of kernels.hpp, for the set whose simd_*.hpp and formulas.inl were included before.
//
// Some 2 ns for 16 numbers, against 16 K / 1000 us for the sums that they come from.

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
