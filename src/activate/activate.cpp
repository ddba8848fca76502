#include "shunt/activate.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "activate/cpu_engine.hpp"
#include "activate/cuda_engine.hpp"
#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/quantise.hpp"
#include "cpu/pool.hpp"
#include "cuda/current.hpp"

namespace shunt {
namespace cpu_engine {

const ActivateKernels& activate_kernels([[maybe_unused]] Isa isa) {
#if SHUNT_X86
  switch (isa) {
    case Isa::avx512_bf16:
    case Isa::amx_bf16:
    case Isa::avx512:
      return avx512::activate_kernels;
    case Isa::avx2:
      return avx2::activate_kernels;
    case Isa::scalar:
      break;
  }
#endif
  return scalar::activate_kernels;
}

ActivationRule activation_rule(const ActivationSpec& spec) {
  return {.kind = static_cast<ActivationRule::Kind>(spec.kind),
          .gated = spec.gated,
          .limit_output = spec.limit_on == LimitOn::output,
          .alpha = spec.alpha,
          .limit = spec.limit > 0 ? spec.limit : std::numeric_limits<float>::infinity(),
          .up_offset = spec.up_offset,
          .beta = spec.beta,
          .inverse_beta = spec.beta > 0 ? 1 / spec.beta : 0,
          .linear_beta = spec.linear_beta,
          .inverse_linear_beta = spec.linear_beta > 0 ? 1 / spec.linear_beta : 0};
}

}  // namespace cpu_engine

namespace {

Support legal(const ActivationSpec& spec) {
  const auto kind = static_cast<std::int32_t>(spec.kind);
  if (kind < 0 || kind > static_cast<std::int32_t>(Activation::situ)) {
    return refuse("activation: kind is {}: must be 0 (identity) to 6 (situ)", kind);
  }
  if (spec.limit_on != LimitOn::input && spec.limit_on != LimitOn::output) {
    return refuse("activation: limit_on is {}: must be 0 (input) or 1 (output)",
                  static_cast<std::int32_t>(spec.limit_on));
  }
  if (!std::isfinite(spec.alpha) || spec.alpha <= 0) {
    return refuse("activation: alpha is {}: must be finite and > 0", spec.alpha);
  }
  if (spec.alpha != 1 && spec.kind != Activation::silu) {
    return refuse("activation: alpha is {}: only silu has one", spec.alpha);
  }
  if (!std::isfinite(spec.limit) || spec.limit < 0) {
    return refuse("activation: limit is {}: must be 0 (none) or finite and > 0", spec.limit);
  }
  if (!std::isfinite(spec.up_offset)) {
    return refuse("activation: up_offset is {}: must be finite", spec.up_offset);
  }
  if (spec.up_offset != 0 && !spec.gated) {
    return refuse("activation: up_offset is {}: only a gated form has one", spec.up_offset);
  }
  const bool situ = spec.kind == Activation::situ;
  if (!situ && spec.beta != 1 && spec.beta != 0) {  // 0: of callers in C who name no beta
    return refuse("activation: beta is {}: only situ has one", spec.beta);
  }
  if (spec.linear_beta != 0 && !(situ && spec.gated)) {
    return refuse("activation: linear_beta is {}: only a gated situ has one", spec.linear_beta);
  }
  // Within these x / beta is a normal number wherever it matters.
  const auto legal = [](float beta) { return beta >= 1e-6F && beta <= 1e6F; };
  if (situ && !legal(spec.beta)) {
    return refuse("activation: beta is {}: must be 1e-6 to 1e6", spec.beta);
  }
  if (spec.linear_beta != 0 && !legal(spec.linear_beta)) {
    return refuse("activation: linear_beta is {}: must be 0 (none) or 1e-6 to 1e6",
                  spec.linear_beta);
  }
  return {};
}

}  // namespace

Support supports(const ActivationSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("activation", device);
}

namespace {

// Both forms of activate() but for what is written. Rows to compute; on a GPU all that there are.
std::int64_t checked_rows(const Context& context, const ActivationSpec& spec, const Tensor& gate,
                          const Tensor& up, const Tensor& out,
                          std::initializer_list<DType> out_dtypes, const Tensor& rows) {
  const Device device = context.device();
  require_legal(legal(spec), "activate");
  require(supports(spec, device), "activate");
  check_tensor("activate: up", up,
               {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true}, device);
  const std::int64_t width = up.shape[1];
  const std::int64_t count = up.shape[0];
  const TensorRule same{.dtypes = float_dtypes, .shape = {count, width}, .rows_dense = true};
  if (check_given("activate: gate", gate, spec.gated, "the spec's gated")) {
    check_tensor("activate: gate", gate, same, device);
  }
  check_tensor("activate: out", out,
               {.dtypes = out_dtypes, .shape = {count, width}, .rows_dense = true, .written = true},
               device);
  if (!rows) return count;
  check_tensor("activate: rows", rows, {.dtypes = {DType::i32}, .shape = {1}}, device);
  return device.type == DeviceType::cuda
             ? count
             : std::clamp<std::int64_t>(*rows.as<std::int32_t>(), 0, count);
}

using cpu_engine::Form;

// Columns of a row of gate and up, for the kernels.
struct Operands {
  const Tensor& gate;
  const Tensor& up;

  static Form form(const Tensor& t) { return static_cast<Form>(t.dtype); }
  static char* at(const Tensor& t, std::int64_t row, std::int64_t column) {
    return t.as<char>() + bytes(t.dtype, row * t.strides[0] + column);
  }
  void compute(const cpu_engine::ActivateKernels& kernels, const cpu_engine::ActivationRule& rule,
               std::int64_t row, std::int64_t column, void* out, Form out_form,
               std::size_t columns) const {
    kernels.row(rule, rule.gated ? at(gate, row, column) : nullptr, form(gate), at(up, row, column),
                form(up), out, out_form, columns);
  }
};

// A part worth starting a thread for: some ten microseconds.
std::int64_t grain_of(std::int64_t width) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
}

}  // namespace

void activate(const Context& context, const ActivationSpec& spec, Tensor gate, Tensor up,
              Tensor out, Tensor rows) {
  const cuda_engine::Current current(context);
  const std::int64_t count = checked_rows(context, spec, gate, up, out, float_dtypes, rows);
  check_same_or_apart("activate: out", out, "gate", gate);
  check_same_or_apart("activate: out", out, "up", up);
  check_apart("activate: out", out, "rows", rows);
  const cpu_engine::ActivationRule rule = cpu_engine::activation_rule(spec);
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      return cuda_engine::activate(context.gpu(), rule, gate, up, out, rows);
    }
  }
  cpu_engine::Pool& pool = context.pool();
  const cpu_engine::ActivateKernels& kernels = cpu_engine::activate_kernels(pool.isa());
  const Operands operands{gate, up};
  const auto width = static_cast<std::size_t>(up.shape[1]);
  pool.split(count, grain_of(up.shape[1]), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      operands.compute(kernels, rule, r, 0, Operands::at(out, r, 0), Operands::form(out), width);
    }
  });
}

void activate(const Context& context, const ActivationSpec& spec, const QuantiseSpec& quantise,
              Tensor gate, Tensor up, Tensor out, Tensor scales, Tensor rows) {
  const cuda_engine::Current current(context);
  require_legal(legal(quantise), "activate");
  if (quantise.quantise == Quantise::none) {
    fail(Status::invalid_argument,
         "activate: quantise is 0 (none): must be 1 (row) or 2 (block_128) where there are scales");
  }
  const std::int64_t count = checked_rows(context, spec, gate, up, out, {DType::f8_e4m3}, rows);
  const std::int64_t width = up.shape[1];
  check_given("activate: scales", scales, true, "quantise");
  check_scales("activate: scales", scales, quantise.quantise, up.shape[0], width, context.device());
  check_all_apart("activate", {{"out", out}, {"scales", scales}},
                  {{"gate", gate}, {"up", up}, {"rows", rows}});
  const cpu_engine::ActivationRule rule = cpu_engine::activation_rule(spec);
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      return cuda_engine::activate_quantised(context.gpu(), rule, quantise, gate, up, out, scales,
                                             rows);
    }
  }
  cpu_engine::Pool& pool = context.pool();
  const cpu_engine::ActivateKernels& kernels = cpu_engine::activate_kernels(pool.isa());
  const Operands operands{gate, up};
  pool.split(count, grain_of(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      quantise_row(quantise, static_cast<std::size_t>(width),
                   out.as<std::uint8_t>() + r * out.strides[0],
                   scales.as<float>() + r * scales.strides[0], scales.strides[1],
                   [&](std::size_t h, std::size_t columns, float* values) {
                     operands.compute(kernels, rule, r, static_cast<std::int64_t>(h), values,
                                      Form::f32, columns);
                   });
    }
  });
}

}  // namespace shunt
