#include "layer/reference.hpp"

#include <algorithm>
#include <cmath>

#include "activate/reference.hpp"
#include "core/convert.hpp"

namespace shunt {

namespace {

using Vector = std::vector<double>;

double at(const Tensor& tensor, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t offset =
      i * tensor.strides[0] + (tensor.rank == 2 ? j * tensor.strides[1] : 0);
  return static_cast<double>(load_f32(tensor.data, tensor.dtype, offset));
}

Vector row_of(const Tensor& x, std::int64_t t) {
  Vector row(static_cast<std::size_t>(x.shape[1]));
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = at(x, t, static_cast<std::int64_t>(i));
  return row;
}

// W x + b
Vector product(const Tensor& w, const Tensor& bias, const Vector& x) {
  Vector y(static_cast<std::size_t>(w.shape[0]));
  for (std::size_t n = 0; n < y.size(); ++n) {
    y[n] = bias ? at(bias, static_cast<std::int64_t>(n)) : 0;
    for (std::size_t k = 0; k < x.size(); ++k) {
      y[n] += at(w, static_cast<std::int64_t>(n), static_cast<std::int64_t>(k)) * x[k];
    }
  }
  return y;
}

Vector normalised(const NormSpec& spec, const Tensor& weight, Vector x) {
  if (!spec.enabled) return x;
  const auto weigh = [&] {
    for (std::size_t i = 0; i < x.size() && weight; ++i) {
      x[i] *= at(weight, static_cast<std::int64_t>(i));
    }
  };
  if (spec.weight_first) weigh();
  double mean = 0;
  for (const double value : x) mean += value * value / static_cast<double>(x.size());
  const double factor =
      static_cast<double>(spec.multiplier) / std::sqrt(mean + static_cast<double>(spec.epsilon));
  for (double& value : x) value *= factor;
  if (!spec.weight_first) weigh();
  return x;
}

Vector expert(const ActivationSpec& activation, const ExpertWeights& weights, std::size_t e,
              const Vector& x) {
  const auto part = [&](const std::vector<Tensor>& list) {
    return e < list.size() ? list[e] : Tensor{};
  };
  Vector h = product(part(weights.up), part(weights.up_bias), x);
  Vector gate(h.size());
  if (activation.gated) gate = product(part(weights.gate), part(weights.gate_bias), x);
  for (std::size_t i = 0; i < h.size(); ++i) h[i] = activate_reference(activation, gate[i], h[i]);
  return product(part(weights.down), part(weights.down_bias), h);
}

double root_mean_square(const Vector& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  return std::sqrt(squares / static_cast<double>(x.size()));
}

// What becomes of changes of the numbers of y of this size, by W and by the norm.
Vector spread_of_product(const Tensor& w, const Vector& x) {
  Vector y(static_cast<std::size_t>(w.shape[0]), 0.0);
  for (std::size_t n = 0; n < y.size(); ++n) {
    for (std::size_t k = 0; k < x.size(); ++k) {
      y[n] += std::abs(at(w, static_cast<std::int64_t>(n), static_cast<std::int64_t>(k))) * x[k];
    }
  }
  return y;
}
Vector spread_of_norm(const Vector& y, const Vector& normed, Vector spread) {
  const double all = root_mean_square(spread) / std::max(root_mean_square(y), 1e-300);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double factor = y[i] != 0 ? std::abs(normed[i] / y[i]) : 0;
    spread[i] = factor * spread[i] + std::abs(normed[i]) * all;
  }
  return spread;
}

void add(Vector& y, double factor, const Vector& x) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += factor * x[i];
}

}  // namespace

std::vector<double> router_input_reference(const LayerSpec& spec, const LayerWeights& weights,
                                           const Tensor& x) {
  Vector result;
  for (std::int64_t t = 0; t < x.shape[0]; ++t) {
    const Vector row = normalised(spec.router_norm, weights.router_norm, row_of(x, t));
    result.insert(result.end(), row.begin(), row.end());
  }
  return result;
}

std::vector<double> layer_reference(const LayerSpec& spec, const LayerWeights& weights,
                                    const Tensor& x, const std::int32_t* ids,
                                    const float* routing_weights, std::vector<double>* spread) {
  const int slots = spec.route.slots();
  const int routed = spec.route.experts - spec.zero_experts;
  Vector result;
  for (std::int64_t t = 0; t < x.shape[0]; ++t) {
    const Vector row = row_of(x, t);
    Vector input = normalised(spec.input_norm, weights.input_norm, row);
    if (spec.latent > 0) {
      input = normalised(spec.latent_input_norm, weights.latent_input_norm,
                         product(weights.latent_down, {}, input));
    }

    Vector sum(input.size(), 0.0), sizes(input.size(), 0.0);
    for (std::int64_t pair = t * slots; pair < (t + 1) * slots; ++pair) {
      const std::int32_t id = ids[pair];
      const double w = static_cast<double>(routing_weights[pair]);
      if (id < 0) continue;
      if (spec.zero_experts > 0 && id >= routed) {
        add(sum, w, row);
        continue;
      }
      Vector scaled = input;
      if (spec.route.weight_on_input) {
        for (double& value : scaled) value *= w;
      }
      const double factor = spec.route.weight_on_input ? 1.0 : w;
      const Vector returned = normalised(
          spec.expert_norm, weights.expert_norm,
          expert(spec.experts.activation, weights.experts, static_cast<std::size_t>(id), scaled));
      add(sum, factor, returned);
      // A row that is normed is rounded before, which its norm follows, and after.
      const double roundings = spec.expert_norm.enabled ? 3 : 1;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        sizes[i] += roundings * std::abs(factor * returned[i]);
      }
    }
    Vector y = sum;
    if (spec.latent > 0) {
      const Vector normed = normalised(spec.latent_norm, weights.latent_norm, sum);
      if (spec.latent_norm.enabled) sizes = spread_of_norm(sum, normed, std::move(sizes));
      y = product(weights.latent_up, {}, normed);
      sizes = spread_of_product(weights.latent_up, sizes);
      for (std::size_t i = 0; i < y.size(); ++i) sizes[i] += std::abs(y[i]);  // rounded itself
    }
    if (spec.shared.intermediate > 0) {
      double factor = static_cast<double>(spec.shared.scale);
      if (spec.shared.sigmoid_gate) {
        const Tensor& gate = weights.shared_gate;
        const Tensor vector = gate.rank == 2 ? gate[0] : gate;
        double logit = 0;
        for (std::size_t i = 0; i < row.size(); ++i) {
          logit += at(vector, static_cast<std::int64_t>(i)) * row[i];
        }
        factor /= 1 + std::exp(-logit);
      }
      add(y, factor, expert(spec.shared.activation, weights.shared, 0, row));
    }
    for (std::size_t i = 0; i < y.size() && spec.output_bias; ++i) {
      y[i] += at(weights.output_bias, static_cast<std::int64_t>(i));
    }
    const Vector normed = normalised(spec.output_norm, weights.output_norm, y);
    if (spread != nullptr) {
      if (spec.output_norm.enabled) sizes = spread_of_norm(y, normed, std::move(sizes));
      spread->insert(spread->end(), sizes.begin(), sizes.end());
    }
    y = normed;
    result.insert(result.end(), y.begin(), y.end());
  }
  return result;
}

}  // namespace shunt
