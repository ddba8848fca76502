// Cases of activate: gate and up, as one GEMM leaves them, into what the next one takes.
#include <fmt/core.h>

#include <cmath>
#include <memory>

#include "bench_cases.hpp"
#include "bench_tensors.hpp"
#include "core/convert.hpp"
#include "shunt/activate.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

namespace {

struct Activations {
  Context context;
  ActivationSpec spec;
  QuantiseSpec quantise;
  Variants products;  // [R, I], gated [R, 2 I]: a row's gate before its up
  Variants out, scales;

  void run(const Context& where, const Tensor& product, const Tensor& to,
           const Tensor& of_rows) const {
    Tensor gate = product;
    gate.shape[1] = to.shape[1];
    Tensor up = gate;
    if (spec.gated) up.data = up.as<char>() + bytes(up.dtype, up.shape[1]);
    if (!spec.gated) gate = {};
    if (quantise.quantise == Quantise::none) return activate(where, spec, gate, up, to);
    activate(where, spec, quantise, gate, up, to, of_rows);
  }
};

// Nothing is summed here: the engines' e4m3 may differ only by its next number, where their
// exponentials, of different last bits, round to either side.
void check_activations(const Activations& made, const std::string& label) {
  const OnHost got(made.context, made.out[0]), product(made.context, made.products[0]),
      got_scales(made.context, made.scales[0]);
  const OnHost want(made.context, made.out[0]), want_scales(made.context, made.scales[0]);
  made.run(host(), product.tensor, want.tensor, want_scales.tensor);
  if (made.quantise.quantise == Quantise::none) return check_close(label, got, want);
  const std::int64_t width = got.tensor.shape[1];
  const std::int64_t block = made.quantise.quantise == Quantise::row ? width : 128;
  for (std::int64_t i = 0; i < got.tensor.elements(); ++i) {
    const std::int64_t row = i / width, column = i % width;
    const std::int64_t scale = row * ((width + block - 1) / block) + column / block;
    const auto value = [&](const OnHost& values, const OnHost& scales) {
      return e4m3_to_f32(values.tensor.as<std::uint8_t>()[i]) * scales.floats()[scale];
    };
    const float a = value(got, got_scales), b = value(want, want_scales);
    if (!(std::abs(a - b) <= 0.13F * std::abs(b) + want_scales.floats()[scale] * 0x1p-8F)) {
      differs(label, fmt::format("row {}, column {} is {}, not {}", row, column, a, b));
    }
  }
}

}  // namespace

StageCase activate_case(const Context& context, const bench::StageShape& shape,
                        std::int64_t rotate_bytes) {
  if (shape.rows == RowFormat::nvfp4) {
    throw Error(Status::unsupported, "bench: activate rounds to fp8_token and fp8_block only");
  }
  auto made = std::make_shared<Activations>(Activations{.context = context});
  made->spec = shape.layer->experts.activation;
  require(supports(made->spec, context.device()));
  const bool rounds = shape.rows != RowFormat::as_dtype;
  if (rounds) {
    made->quantise.quantise =
        shape.rows == RowFormat::fp8_token ? Quantise::row : Quantise::block_128;
  }
  const std::int64_t width = shape.layer->experts.intermediate;
  const std::int64_t rows = shape.tokens * shape.route.top_k, sides = made->spec.gated ? 2 : 1;
  const bool per_row = shape.rows == RowFormat::fp8_token;
  const std::int64_t blocks = per_row ? 1 : (width + 127) / 128;
  const auto n = static_cast<double>(rows * width);
  const double written =
      rounds ? n + 4 * static_cast<double>(rows * blocks) : element_bytes(shape.dtype) * n;
  const double moved = element_bytes(shape.dtype) * static_cast<double>(sides) * n + written;
  const std::int64_t copies = variants_for(moved, rotate_bytes);
  made->products = Variants(context, shape.dtype, {rows, sides * width}, copies);
  made->out = Variants(context, rounds ? DType::f8_e4m3 : shape.dtype, {rows, width}, copies);
  if (rounds) {
    made->scales = per_row ? Variants(context, DType::f32, {rows}, copies)
                           : Variants(context, DType::f32, {rows, blocks}, copies);
  }
  fill(context, made->products, 1, 1);
  const std::string label = fmt::format("T{} R{} I{}{}", shape.tokens, rows, width,
                                        rounds ? " to " + to_string(shape.rows) : std::string());
  return {.op = "activate",
          .label = label,
          .dtype = shape.dtype,
          .variants = copies,
          .cost = {moved, 0, written},
          .call =
              [made](std::int64_t i) {
                made->run(made->context, made->products[i], made->out[i], made->scales[i]);
              },
          .check = [made, label] { check_activations(*made, label); }};
}

}  // namespace shunt::tool
