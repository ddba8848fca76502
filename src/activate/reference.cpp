#include "activate/reference.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace shunt {

namespace {

double act(const ActivationSpec& spec, double x) {
  switch (spec.kind) {
    case Activation::identity:
      return x;
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::relu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
    case Activation::silu:
      return x / (1 + std::exp(-static_cast<double>(spec.alpha) * x));
    // Hendrycks and Gimpel, arXiv:1606.08415
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    // (1 + tanh z) / 2 = 1 / (1 + e^(-2z)), without the cancellation.
    case Activation::gelu_tanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Activation::situ:
      return static_cast<double>(spec.beta) * std::tanh(x / static_cast<double>(spec.beta)) /
             (1 + std::exp(-x));
  }
  return std::nan("");
}

}  // namespace

double activate_reference(const ActivationSpec& spec, double gate, double up) {
  const double limit = static_cast<double>(spec.limit);
  double x = spec.gated ? gate : up;
  if (limit > 0 && spec.limit_on == LimitOn::input) x = std::min(x, limit);
  double h = act(spec, x);
  if (limit > 0 && spec.limit_on == LimitOn::output) h = std::min(h, limit);
  if (!spec.gated) return h;
  if (limit > 0) up = std::clamp(up, -limit, limit);
  if (const double beta = static_cast<double>(spec.linear_beta); beta > 0) {
    up = beta * std::tanh(up / beta);
  }
  return h * (up + static_cast<double>(spec.up_offset));
}

}  // namespace shunt
