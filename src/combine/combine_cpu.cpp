// A weighted sum of rows, token by token. Each element's sum has one order, and no element shares
// anything with another, so that neither threads nor the batch change a bit.
//
// Bytes: every row is read once, every output written once. Bound by memory.
#include <algorithm>
#include <cmath>

#include "combine/engine.hpp"
#include "combine/kernels.hpp"
#include "cpu/pool.hpp"

namespace shunt {

namespace {

using cpu_engine::Form;
using cpu_engine::Term;

constexpr int max_terms = 128 + 2;  // slots, shared expert, residual

const cpu_engine::CombineKernels& kernels([[maybe_unused]] cpu_engine::Isa isa) {
#if SHUNT_X86
  switch (isa) {
    case cpu_engine::Isa::avx512_bf16:
    case cpu_engine::Isa::amx_bf16:
    case cpu_engine::Isa::avx512:
      return cpu_engine::avx512::combine_kernels;
    case cpu_engine::Isa::avx2:
      return cpu_engine::avx2::combine_kernels;
    case cpu_engine::Isa::scalar:
      break;
  }
#endif
  return cpu_engine::scalar::combine_kernels;
}

// Rows of a [., H] tensor, as terms.
struct Rows {
  const char* data = nullptr;
  std::int64_t row_bytes = 0;
  Form form = Form::f32;

  explicit Rows(const Tensor& tensor)
      : data(tensor.as<char>()),
        row_bytes(tensor ? tensor.strides[0] * bits(tensor.dtype) / 8 : 0),
        form(static_cast<Form>(tensor.dtype)) {}
  Term term(std::int64_t row, float weight) const { return {data + row * row_bytes, form, weight}; }
};

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

void combine_cpu(const Context& context, const CombineSpec& spec, const CombineInputs& in,
                 const Tensor& out) {
  const std::int64_t tokens = out.shape[0];
  const std::int64_t width = out.shape[1];
  const std::int64_t valid =
      in.valid_tokens ? std::clamp<std::int64_t>(*in.valid_tokens.as<std::int32_t>(), 0, tokens)
                      : tokens;
  const std::int32_t* inverse = in.inverse.as<std::int32_t>();
  const std::int32_t* ids = in.ids.as<std::int32_t>();
  const float* weights = in.weights.as<float>();
  const Rows rows(in.rows), hidden(in.hidden), shared(in.shared), residual(in.residual);
  const auto out_form = static_cast<Form>(out.dtype);
  const std::int64_t out_bytes = out.strides[0] * bits(out.dtype) / 8;
  const auto sum = kernels(context.pool().isa()).columns;

  const auto columns = [&](std::int64_t t, std::int64_t begin, std::int64_t end) {
    Term terms[max_terms];
    std::size_t count = 0;
    for (int s = 0; s < spec.slots && t < valid; ++s) {
      const std::int64_t pair = t * spec.slots + s;
      if (inverse[pair] >= 0) {
        terms[count++] = rows.term(inverse[pair], spec.weighted ? weights[pair] : 1);
      } else if (ids != nullptr && ids[pair] >= spec.identity_from &&
                 ids[pair] <= last_identity(spec)) {
        terms[count++] = hidden.term(t, weights[pair]);
      }
    }
    if (in.shared && t < valid) {
      const float gate = spec.shared_gate ? sigmoid(in.shared_gate.as<float>()[t]) : 1;
      terms[count++] = shared.term(t, spec.shared_scale * gate);
    }
    if (in.residual && t < valid) terms[count++] = residual.term(t, 1);
    sum(terms, count, out.as<char>() + t * out_bytes, out_form, static_cast<std::size_t>(begin),
        static_cast<std::size_t>(end));
  };

  // Few tokens are split over their columns. A thread is worth waking for some 64k products.
  const std::int64_t threads = context.threads();
  const std::int64_t parts =
      tokens >= 4 * threads ? 1 : std::clamp<std::int64_t>(width / 512, 1, threads);
  const std::int64_t products = std::max<std::int64_t>(1, width * (spec.slots + 1) / parts);
  const std::int64_t grain = std::max<std::int64_t>(1, 65536 / products);
  context.pool().split(tokens * parts, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto [first, last] =
          cpu_engine::share(width, static_cast<int>(i % parts), static_cast<int>(parts), 16);
      columns(i / parts, first, last);
    }
  });
}

}  // namespace shunt
