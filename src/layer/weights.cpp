#include "layer/weights.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string>

#include "core/check.hpp"

namespace shunt {

namespace {

void check_list(const std::string& name, const std::vector<Tensor>& tensors, bool wanted, int count,
                std::initializer_list<std::int64_t> shape) {
  const std::size_t expected = wanted ? static_cast<std::size_t>(count) : 0;
  if (tensors.size() != expected) {
    fail(Status::invalid_argument, "layer: {} has {} tensors, the spec asks for {}", name,
         tensors.size(), expected);
  }
  for (std::size_t e = 0; e < tensors.size(); ++e) {
    check_tensor(fmt::format("layer: {}[{}]", name, e), tensors[e],
                 {.dtypes = float_dtypes, .shape = shape}, Device{});
  }
}

void check_experts(const std::string& name, const ExpertWeights& weights, int count,
                   std::int64_t hidden, std::int64_t intermediate, bool gated, bool gate_up_bias,
                   bool down_bias) {
  check_list(name + ".gate", weights.gate, gated, count, {intermediate, hidden});
  check_list(name + ".up", weights.up, true, count, {intermediate, hidden});
  check_list(name + ".down", weights.down, true, count, {hidden, intermediate});
  check_list(name + ".gate_bias", weights.gate_bias, gated && gate_up_bias, count, {intermediate});
  check_list(name + ".up_bias", weights.up_bias, gate_up_bias, count, {intermediate});
  check_list(name + ".down_bias", weights.down_bias, down_bias, count, {hidden});
}

void check_one(const char* name, const Tensor& tensor, bool wanted,
               std::initializer_list<std::int64_t> shape) {
  const std::string full = fmt::format("layer: weights.{}", name);
  if (check_given(full, tensor, wanted, "the LayerSpec")) {
    check_tensor(full, tensor, {.dtypes = float_dtypes, .shape = shape}, Device{});
  }
}

}  // namespace

void check_weights(const LayerSpec& spec, const LayerWeights& weights) {
  const RouteSpec& route = spec.route;
  const std::int64_t hidden = spec.hidden;
  const std::int64_t columns = route.columns();
  check_one("router", weights.router, true, {columns, hidden});
  check_one("router_bias", weights.router_bias, route.router_bias, {columns});
  check_one("selection_bias", weights.selection_bias, route.selection_bias, {route.experts});
  check_one("per_expert_scale", weights.per_expert_scale, route.per_expert_scale, {columns});
  if (check_given("layer: weights.hash_table", weights.hash_table, route.hashed, "the LayerSpec")) {
    check_tensor("layer: weights.hash_table", weights.hash_table,
                 {.dtypes = {DType::i32, DType::i64}, .shape = {any_size, route.top_k}}, Device{});
  }
  check_experts("experts", weights.experts, spec.experts.experts, spec.experts.hidden,
                spec.experts.intermediate, spec.experts.activation.gated, spec.experts.gate_up_bias,
                spec.experts.down_bias);
  const bool shared = spec.shared.intermediate > 0;
  check_experts("shared", weights.shared, shared ? 1 : 0, hidden, spec.shared.intermediate,
                spec.shared.activation.gated, spec.shared.gate_up_bias, spec.shared.down_bias);
  if (check_given("layer: weights.shared_gate", weights.shared_gate,
                  shared && spec.shared.sigmoid_gate, "the LayerSpec")) {
    const Tensor& gate = weights.shared_gate;
    check_tensor("layer: weights.shared_gate", gate.rank == 2 ? gate.rows(0, 1)[0] : gate,
                 {.dtypes = float_dtypes, .shape = {hidden}}, Device{});
  }
  check_one("latent_down", weights.latent_down, spec.latent > 0, {spec.latent, hidden});
  check_one("latent_up", weights.latent_up, spec.latent > 0, {hidden, spec.latent});
  check_one("output_bias", weights.output_bias, spec.output_bias, {hidden});
  const auto norm = [&](const char* name, const Tensor& weight, const NormSpec& norm_spec) {
    check_one(name, weight, norm_spec.enabled && norm_spec.weight, {hidden});
  };
  norm("router_norm", weights.router_norm, spec.router_norm);
  norm("input_norm", weights.input_norm, spec.input_norm);
  norm("output_norm", weights.output_norm, spec.output_norm);
}

HeldWeights::HeldWeights(const Context& context, const LayerWeights& weights) {
  const auto hold = [&](Tensor source) -> Tensor {
    if (!source) return {};
    // [1, H] becomes [H]: one form for the gate of a shared expert.
    Tensor dense = source;
    std::int64_t stride = 1;
    for (int d = dense.rank - 1; d >= 0; --d) {
      dense.strides[static_cast<std::size_t>(d)] = stride;
      stride *= dense.shape[static_cast<std::size_t>(d)];
    }
    const std::int64_t width = bits(source.dtype) / 8;
    buffers_.push_back(context.allocate(static_cast<std::size_t>(stride * width)));
    auto* to = static_cast<char*>(buffers_.back().data());
    const auto* from = static_cast<const char*>(source.data);
    const std::int64_t columns = dense.rank == 2 ? dense.shape[1] : 1;
    const std::int64_t column_stride = dense.rank == 2 ? source.strides[1] : 1;
    for (std::int64_t i = 0; i < dense.shape[0]; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        std::memcpy(to + (i * columns + j) * width,
                    from + (i * source.strides[0] + j * column_stride) * width,
                    static_cast<std::size_t>(width));
      }
    }
    dense.data = to;
    return dense;
  };
  views.router = hold(weights.router);
  views.router_bias = hold(weights.router_bias);
  views.selection_bias = hold(weights.selection_bias);
  views.per_expert_scale = hold(weights.per_expert_scale);
  views.hash_table = hold(weights.hash_table);
  views.shared_gate = hold(weights.shared_gate);
  if (views.shared_gate.rank == 2) views.shared_gate = views.shared_gate[0];
  views.latent_down = hold(weights.latent_down);
  views.latent_up = hold(weights.latent_up);
  views.output_bias = hold(weights.output_bias);
  views.router_norm = hold(weights.router_norm);
  views.input_norm = hold(weights.input_norm);
  views.output_norm = hold(weights.output_norm);
}

std::size_t HeldWeights::bytes() const {
  std::size_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.bytes();
  return total;
}

}  // namespace shunt
