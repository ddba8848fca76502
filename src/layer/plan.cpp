#include "layer/plan.hpp"

#include <algorithm>
#include <cmath>

#include "gemm/few_chain.hpp"

namespace shunt {

namespace {

std::int64_t element(DType dtype) { return bits(dtype) / 8; }

std::int64_t gate_up_columns(const ActivationSpec& activation, std::int64_t intermediate) {
  return activation.gated ? 2 * intermediate : intermediate;
}

}  // namespace

LayerScratch carve(const LayerSpec& spec, const LayerOptions& options, DType rows,
                   std::int64_t tokens, std::size_t stage_bytes, Workspace workspace) {
  Carver carver = workspace.data == nullptr ? Carver() : Carver(workspace);
  const std::int64_t pairs = tokens * spec.route.slots();
  const std::int64_t width = element(options.dtype);
  LayerScratch s;
  s.ids = carver.take<std::int32_t>(pairs);
  s.weights = carver.take<float>(pairs);
  s.offsets = carver.take<std::int32_t>(spec.experts.experts + 1);
  s.permutation = carver.take<std::int32_t>(pairs);
  s.inverse = carver.take<std::int32_t>(pairs);
  if (spec.route.weight_on_input) s.row_weights = carver.take<float>(pairs);
  if (spec.router_norm.enabled) s.router_input = carver.take<float>(tokens * spec.hidden);
  if (spec.input_norm.enabled) s.normed = carver.take<float>(tokens * spec.hidden);
  if (spec.latent > 0) {
    s.latent = carver.take<char>(tokens * spec.latent * element(rows));
    if (spec.latent_input_norm.enabled || spec.latent_norm.enabled) {
      s.wide_latents = carver.take<float>(tokens * spec.latent);
    }
  }
  const auto fp8_bytes = [&](std::int64_t columns) {
    return in_fp8(options.rows) ? Fp8Rows::bytes(options.rows, pairs, columns) : 0;
  };
  s.h = carver.take<char>(
      std::max(pairs * spec.experts.intermediate * width, fp8_bytes(spec.experts.intermediate)));
  // Before they are the experts' rows: those of the layer's dtype that are gathered.
  s.rows = carver.take<char>(std::max(pairs * spec.experts.hidden * std::max(width, element(rows)),
                                      fp8_bytes(spec.experts.hidden)));
  if (spec.shared.intermediate > 0) {
    const auto fp8_or = [&](std::int64_t bytes, std::int64_t columns) {
      if (!in_fp8(options.rows)) return bytes;
      return std::max(bytes, Fp8Rows::bytes(options.rows, tokens, columns));
    };
    s.shared_h = carver.take<char>(
        fp8_or(tokens * spec.shared.intermediate * width, spec.shared.intermediate));
    // Before they are the shared expert's rows: those of x in fp8.
    s.shared = carver.take<char>(fp8_or(tokens * spec.hidden * element(rows), spec.hidden));
    if (spec.shared.sigmoid_gate) s.shared_logits = carver.take<float>(tokens);
  }
  if (spec.output_bias || spec.output_norm.enabled || spec.latent > 0) {
    s.wide = carver.take<char>(tokens * spec.hidden * element(wide_dtype(spec, rows)));
  }
  s.stage = carver.take_bytes(stage_bytes);
  s.stage_bytes = stage_bytes;
  s.total_bytes = carver.used();
  return s;
}

DType wide_dtype(const LayerSpec& spec, DType rows) {
  return spec.latent > 0 && !spec.output_norm.enabled ? rows : DType::f32;
}

OrderSpec order_spec(const LayerSpec& spec) {
  return {.experts = spec.route.experts + spec.route.shared.count,
          .slots = spec.route.slots(),
          .local_experts = spec.experts.experts};
}

bool routes_and_orders_at_once(const LayerSpec& spec, Device device, std::int64_t tokens,
                               bool dependent_launch) {
  return device.type == DeviceType::cuda && !dependent_launch &&
         tokens * spec.route.slots() <= most_pairs_at_once;
}

bool orders_in_products(const LayerSpec& spec, Device device, std::int64_t tokens, IdsFrom from,
                        RowFormat rows) {
  const std::int64_t most = from == IdsFrom::router ? cuda_engine::most_chained_tokens
                            : in_fp8(rows)          ? 1
                                                    : 2;
  return device.type == DeviceType::cuda && tokens <= most &&
         tokens * spec.route.slots() <= cuda_engine::most_chained_pairs &&
         !spec.input_norm.enabled && !spec.expert_norm.enabled;
}

bool adds_up(const LayerSpec& spec, std::int64_t tokens) {
  // What lies behind a projection from latents has its own turn.
  const bool last = spec.latent > 0 || (spec.shared.intermediate == 0 && !spec.output_bias &&
                                        !spec.output_norm.enabled);
  return tokens == 1 && spec.route.slots() <= cuda_engine::most_summed_pairs && last &&
         spec.zero_experts == 0 && !spec.expert_norm.enabled;
}

bool one_row_a_token(const LayerSpec& spec) {
  return spec.route.slots() == 1 && spec.shared.intermediate == 0 && spec.latent == 0 &&
         spec.zero_experts == 0 && !spec.output_bias && !spec.output_norm.enabled &&
         !spec.expert_norm.enabled;
}

SharedPlan plan_shared(Device device, std::int64_t tokens, double us) {
  if (device.type != DeviceType::cuda) return {};
  constexpr double fork_and_join_us = 3;
  const double routing_us = 5 + static_cast<double>(tokens) / 400;
  const double hidden = std::min(us, routing_us);
  return {.beside = hidden > fork_and_join_us, .us = us, .hidden = hidden};
}

CombineSpec combine_spec(const LayerSpec& spec) {
  const bool shared = spec.shared.intermediate > 0 && spec.latent == 0;
  return {.slots = spec.route.slots(),
          .weighted = !spec.route.weight_on_input,
          .identity_from = spec.zero_experts > 0 ? spec.route.experts - spec.zero_experts : -1,
          .identity_until = spec.zero_experts > 0 ? spec.route.experts : 0,
          .shared_gate = shared && spec.shared.sigmoid_gate,
          .shared_scale = shared ? spec.shared.scale : 1.0f};
}

StageCost route_cost(const LayerSpec& spec, const LayerWeights& held, std::int64_t tokens,
                     DType hidden) {
  return {held.router.bytes() + tokens * spec.hidden * element(hidden) +
              tokens * spec.route.slots() * 8,
          2 * tokens * spec.route.columns() * spec.hidden};
}

StageCost order_cost(const LayerSpec& spec, std::int64_t tokens) {
  // ids read, permutation and inverse written
  return {tokens * spec.route.slots() * 12 + std::int64_t{4} * spec.experts.experts, 0};
}

StageCost gate_up_cost(const LayerSpec& spec, DType dtype, std::int64_t tokens, std::int64_t rows,
                       int hit, DType hidden) {
  const ExpertSpec& e = spec.experts;
  const std::int64_t columns = gate_up_columns(e.activation, e.intermediate);
  return {hit * columns * e.hidden * element(dtype) + tokens * e.hidden * element(hidden) +
              rows * e.intermediate * element(dtype),
          2 * rows * columns * e.hidden};
}

StageCost down_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t rows,
                    int hit) {
  const ExpertSpec& e = spec.experts;
  return {hit * e.intermediate * e.hidden * element(dtype) +
              rows * (e.intermediate * element(dtype) + e.hidden * element(rows_dtype)),
          2 * rows * e.intermediate * e.hidden};
}

StageCost shared_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t tokens,
                      DType hidden) {
  const std::int64_t matrices =
      gate_up_columns(spec.shared.activation, spec.shared.intermediate) + spec.shared.intermediate;
  return {matrices * spec.hidden * element(dtype) +
              tokens * spec.hidden * (element(hidden) + element(rows_dtype)),
          2 * tokens * matrices * spec.hidden};
}

StageCost latent_cost(const LayerSpec& spec, DType dtype, DType rows_dtype, std::int64_t tokens,
                      DType hidden) {
  return {spec.latent * spec.hidden * element(dtype) +
              tokens * (spec.latent * element(rows_dtype) + spec.hidden * element(hidden)),
          2 * tokens * spec.latent * spec.hidden};
}

StageCost packed_cost(const PreparedWeights& weights, int hit) {
  if (weights.format == FormatSpec{}) return {};
  const auto bytes = static_cast<std::int64_t>(weights.bytes) / weights.groups;
  return {hit * (bytes - weights.n * weights.k * element(weights.dtype)), 0};
}

StageCost combine_cost(const LayerSpec& spec, DType rows_dtype, std::int64_t tokens,
                       std::int64_t rows, DType output) {
  const std::int64_t shared =
      spec.shared.intermediate > 0 ? tokens * spec.hidden * element(rows_dtype) : 0;
  return {rows * spec.experts.hidden * element(rows_dtype) + shared +
              tokens * spec.hidden * element(output),
          2 * rows * spec.experts.hidden};
}

double expected_hit(const LayerSpec& spec, std::int64_t tokens) {
  const double experts = spec.route.experts;
  const double each = std::min(1.0, spec.route.top_k / experts);
  const double missed = std::pow(1 - each, static_cast<double>(tokens));
  return spec.route.shared.count * (tokens > 0 ? 1 : 0) +
         (experts - spec.zero_experts) * (1 - missed);
}

}  // namespace shunt
