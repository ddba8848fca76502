#include "cost.hpp"

namespace shunt::tool {

namespace {

// Matrices of an expert: gate, up, down; or up, down.
double matrices(const ActivationSpec& activation) { return activation.gated ? 3 : 2; }

double biases(const ActivationSpec& activation, bool gate_up, bool down, double intermediate,
              double hidden) {
  return (gate_up ? (activation.gated ? 2 : 1) * intermediate : 0) + (down ? hidden : 0);
}

double weight_bytes(DType dtype, const FormatSpec& format) {
  return format == FormatSpec{} ? element_bytes(dtype) : bits_per_weight(format) / 8;
}

}  // namespace

double element_bytes(DType dtype) { return bits(dtype) / 8.0; }

double expert_bytes(const LayerSpec& spec, DType dtype, const FormatSpec& format) {
  const auto& e = spec.experts;
  const auto inner = static_cast<double>(e.intermediate);
  const auto width = static_cast<double>(e.hidden);
  return weight_bytes(dtype, format) * matrices(e.activation) * inner * width +
         element_bytes(dtype) * biases(e.activation, e.gate_up_bias, e.down_bias, inner, width);
}

double shared_bytes(const LayerSpec& spec, DType dtype, const FormatSpec& format) {
  const auto& s = spec.shared;
  const auto inner = static_cast<double>(s.intermediate);
  const auto width = static_cast<double>(spec.hidden);
  if (inner == 0) return 0;
  return weight_bytes(dtype, format) * matrices(s.activation) * inner * width +
         element_bytes(dtype) * (biases(s.activation, s.gate_up_bias, s.down_bias, inner, width) +
                                 (s.sigmoid_gate ? width : 0));
}

double latent_bytes(const LayerSpec& spec, DType dtype) {
  return element_bytes(dtype) * 2 * static_cast<double>(spec.latent) *
         static_cast<double>(spec.hidden);
}

double router_bytes(const LayerSpec& spec, DType dtype) {
  return element_bytes(dtype) * spec.route.experts * static_cast<double>(spec.hidden);
}

Cost layer_cost(const LayerSpec& spec, DType weights, DType rows, std::int64_t tokens,
                std::int64_t experts_hit, std::int64_t pairs, const FormatSpec& format,
                const FormatSpec& shared_format) {
  if (tokens == 0) return {};
  const auto t = static_cast<double>(tokens);
  const auto width = static_cast<double>(spec.hidden);
  const auto& e = spec.experts;
  const auto& s = spec.shared;
  Cost cost;
  cost.bytes = router_bytes(spec, weights) +
               static_cast<double>(experts_hit) * expert_bytes(spec, weights, format) +
               shared_bytes(spec, weights, shared_format) + latent_bytes(spec, weights) +
               2 * t * width * element_bytes(rows);
  cost.flops = 2 * t * spec.route.experts * width +
               2 * static_cast<double>(pairs) * matrices(e.activation) *
                   static_cast<double>(e.intermediate) * static_cast<double>(e.hidden) +
               2 * t * matrices(s.activation) * static_cast<double>(s.intermediate) * width +
               4 * t * static_cast<double>(spec.latent) * width;
  return cost;
}

}  // namespace shunt::tool
