// One call of combine over a random order, run by the engine or by the reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "combine/reference.hpp"
#include "core/convert.hpp"
#include "engine.hpp"
#include "order/reference.hpp"
#include "shunt/combine.hpp"

namespace shunt::test {

// A [rows, width] tensor with a gap after every row. Unwritten memory is 0x4d.
struct Matrix {
  std::vector<std::uint32_t> memory;
  DType dtype = f32;
  std::int64_t rows = 0, width = 0, stride = 0;

  Matrix() = default;
  Matrix(DType type, std::int64_t r, std::int64_t w, std::int64_t gap = 3)
      : memory(static_cast<std::size_t>(r * (w + gap) + 1), 0x4d4d4d4d),
        dtype(type),
        rows(r),
        width(w),
        stride(w + gap) {}
  Matrix(DType type, std::int64_t r, std::int64_t w, std::mt19937& random) : Matrix(type, r, w) {
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < r; ++i) {
      for (std::int64_t h = 0; h < w; ++h) set(i, h, normal(random));
    }
  }
  Tensor tensor() const {
    Tensor t = view(memory.data(), dtype, {rows, width});
    t.strides[0] = stride;
    return t;
  }
  float at(std::int64_t r, std::int64_t h) const {
    return load_f32(memory.data(), dtype, r * stride + h);
  }
  void set(std::int64_t r, std::int64_t h, float value) {
    store_f32(memory.data(), dtype, r * stride + h, value);
  }
  bool operator==(const Matrix&) const = default;
};

struct CombineCase {
  CombineSpec spec;
  std::int64_t tokens = 0;
  Matrix rows, hidden, shared, residual;
  std::vector<std::int32_t> ids, inverse, valid;
  std::vector<float> weights, gate;
  DType out = f32;

  CombineInputs inputs() const {
    CombineInputs in{.rows = rows.tensor(), .inverse = view(inverse.data(), {tokens, spec.slots})};
    const bool identity = spec.identity_from >= 0;
    if (spec.weighted || identity) in.weights = view(weights.data(), {tokens, spec.slots});
    if (identity) in.ids = view(ids.data(), {tokens, spec.slots});
    if (identity) in.hidden = hidden.tensor();
    if (shared.width > 0) in.shared = shared.tensor();
    if (spec.shared_gate) in.shared_gate = view(gate.data(), {tokens});
    if (residual.width > 0) in.residual = residual.tensor();
    if (!valid.empty()) in.valid_tokens = view(valid.data(), {1});
    return in;
  }
  Matrix on(const Context& context) const {
    Matrix y(out, tokens, rows.width);
    call(context, y);
    return y;
  }
  // `y` may be one of this case's own inputs.
  void call(const Context& context, Matrix& y) const { call(context, inputs(), y.tensor()); }
  void call(const Context& context, const CombineInputs& in, const Tensor& y) const {
    Mirror mirror(context);
    const CombineInputs there = {.rows = mirror.in(in.rows),
                                 .inverse = mirror.in(in.inverse),
                                 .weights = mirror.in(in.weights),
                                 .ids = mirror.in(in.ids),
                                 .hidden = mirror.in(in.hidden),
                                 .shared = mirror.in(in.shared),
                                 .shared_gate = mirror.in(in.shared_gate),
                                 .residual = mirror.in(in.residual),
                                 .valid_tokens = mirror.in(in.valid_tokens)};
    combine(context, spec, there, mirror.out(y));
    mirror.fetch();
  }
  Matrix engine(int threads = 1) const { return on(test::engine(threads)); }
  Matrix reference() const {
    Matrix y(out, tokens, rows.width);
    combine_reference(spec, inputs(), y.tensor());
    return y;
  }
};

struct CombineShape {
  std::int64_t tokens = 0, width = 0;
  int experts = 8, slots = 2;
  int tile = 0;  // 0: compact
  DType dtype = f32;
  bool shared = false, residual = false;
};

// spec.slots and the order come from the shape; ids at or past experts are skipped by the order and
// stand for zero-compute experts where the spec has them.
inline CombineCase make_case(CombineSpec spec, const CombineShape& shape, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  spec.slots = shape.slots;
  CombineCase c{.spec = spec, .tokens = shape.tokens, .out = shape.dtype};
  const std::int64_t pairs = shape.tokens * shape.slots;
  for (std::int64_t p = 0; p < pairs; ++p) {
    const auto id = static_cast<std::int32_t>(random() % static_cast<unsigned>(shape.experts + 4));
    c.ids.push_back(id == shape.experts + 3 ? -1 : id);
    c.weights.push_back(static_cast<float>(random() % 1000) / 500.0F - 0.5F);
  }
  const OrderSpec order_spec{.experts = shape.experts, .slots = shape.slots, .tile = shape.tile};
  c.inverse.resize(static_cast<std::size_t>(pairs));
  OrderOutputs out;
  (shape.tile > 0 ? out.padded_inverse : out.inverse) =
      view(c.inverse.data(), {shape.tokens, shape.slots});
  order_reference(order_spec, {.ids = view(c.ids.data(), {shape.tokens, shape.slots})}, out);

  const std::int64_t rows = shape.tile > 0 ? padded_rows_capacity(order_spec, shape.tokens) : pairs;
  c.rows = Matrix(shape.dtype, rows, shape.width, random);
  c.hidden = Matrix(shape.dtype, shape.tokens, shape.width, random);
  if (shape.shared) c.shared = Matrix(shape.dtype, shape.tokens, shape.width, random);
  if (shape.residual) c.residual = Matrix(shape.dtype, shape.tokens, shape.width, random);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    c.gate.push_back(static_cast<float>(random() % 1000) / 100.0F - 5);
  }
  return c;
}

}  // namespace shunt::test
