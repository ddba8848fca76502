// Where a layer sends a token, in double.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "route/reference.hpp"
#include "shunt/layer.hpp"

namespace shunt::testing {

// A vector's numbers; none where it is absent.
inline std::vector<double> numbers(const Tensor& vector) {
  std::vector<double> values;
  for (std::int64_t i = 0; vector && i < vector.shape[0]; ++i) {
    values.push_back(
        static_cast<double>(load_f32(vector.data, vector.dtype, i * vector.strides[0])));
  }
  return values;
}

// x: what the router reads of the token; hashed: its ids where the spec asks for them.
inline RouteReference routing_reference(const LayerSpec& spec, const LayerWeights& weights,
                                        std::span<const double> x, std::vector<int> hashed = {}) {
  RouteReferenceInputs in;
  for (int c = 0; c < spec.route.columns(); ++c) {
    const std::vector<double> row = numbers(weights.router[c]);
    double sum = 0;
    for (std::size_t h = 0; h < x.size(); ++h) sum += x[h] * row[h];
    in.logits.push_back(sum);
  }
  in.router_bias = numbers(weights.router_bias);
  in.selection_bias = numbers(weights.selection_bias);
  in.per_expert_scale = numbers(weights.per_expert_scale);
  in.hashed = std::move(hashed);
  return route_reference(spec.route, in);
}

}  // namespace shunt::testing
