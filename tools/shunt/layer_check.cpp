#include "layer_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>
#include <vector>

#include "bench_tensors.hpp"

namespace shunt::tool {

namespace {

// Weights of some experts, on the host and plain.
class PlainWeights {
 public:
  PlainWeights(const Context& context, const LayerWeights& from, const std::vector<int>& experts)
      : context_(context) {
    weights.experts = plain(from.experts, experts);
    const std::vector<int> shared(from.shared.up.size() + from.shared.packed_up.size(), 0);
    weights.shared = plain(from.shared, shared);
    weights.shared_gate = copied(from.shared_gate);
    weights.latent_down = copied(from.latent_down);
    weights.latent_up = copied(from.latent_up);
    weights.output_bias = copied(from.output_bias);
    weights.input_norm = copied(from.input_norm);
    weights.output_norm = copied(from.output_norm);
    weights.latent_norm = copied(from.latent_norm);
    weights.latent_input_norm = copied(from.latent_input_norm);
    weights.expert_norm = copied(from.expert_norm);
  }
  LayerWeights weights;

 private:
  Tensor copied(const Tensor& there) {
    return there ? copies_.emplace_back(context_, there).tensor : Tensor{};
  }
  Tensor unpacked(const PackedMatrix& matrix) {
    const Buffer& memory =
        memory_.emplace_back(host().allocate(at(matrix.n * matrix.k) * sizeof(float)));
    const Tensor out = view(memory.data(), DType::f32, {matrix.n, matrix.k});
    unpack(matrix, out);
    return out;
  }
  ExpertWeights plain(const ExpertWeights& from, const std::vector<int>& experts) {
    ExpertWeights to;
    for (const int e : experts) {
      const auto take = [&](std::vector<Tensor>& list, const std::vector<Tensor>& all) {
        if (!all.empty()) list.push_back(copied(all[at(e)]));
      };
      const auto take_packed = [&](std::vector<Tensor>& list,
                                   const std::vector<PackedMatrix>& all) {
        if (!all.empty()) list.push_back(unpacked(all[at(e)]));
      };
      take(to.gate, from.gate), take_packed(to.gate, from.packed_gate);
      take(to.up, from.up), take_packed(to.up, from.packed_up);
      take(to.down, from.down), take_packed(to.down, from.packed_down);
      take(to.gate_bias, from.gate_bias);
      take(to.up_bias, from.up_bias);
      take(to.down_bias, from.down_bias);
    }
    return to;
  }

  Context context_;
  std::deque<OnHost> copies_;
  std::deque<Buffer> memory_;
};

void check_token(const std::string& label, const LayerSpec& spec, const LayerWeights& weights,
                 const Context& context, const LayerCall& call, std::int64_t token,
                 float tolerance) {
  const auto row = [&](const Tensor& all) { return OnHost(context, all.rows(token, token + 1)); };
  const OnHost hidden = row(call.hidden), ids = row(call.ids), chosen = row(call.weights),
               output = row(call.output);
  // The experts by new ids, zero-compute ones behind them.
  const int computed = spec.route.experts - spec.zero_experts, k = spec.route.top_k;
  std::vector<int> experts;
  std::vector<std::int32_t> renamed(ids.ints(), ids.ints() + k);
  for (auto& id : renamed) {
    if (id < 0 || id >= computed) continue;
    experts.push_back(id);
    id = static_cast<std::int32_t>(experts.size()) - 1;
  }
  if (experts.empty()) return;
  for (int slot = 0; slot < k; ++slot) {
    if (ids.ints()[slot] >= computed) renamed[at(slot)] = static_cast<int>(experts.size());
  }

  LayerSpec alone = spec;
  alone.routed_outside = true;
  alone.zero_experts = std::min(spec.zero_experts, 1);
  alone.experts.experts = static_cast<int>(experts.size());
  alone.route = {.experts = alone.experts.experts + alone.zero_experts,
                 .top_k = k,
                 .weight_on_input = spec.route.weight_on_input};
  alone.router_norm = {};
  const PlainWeights plain(context, weights, experts);
  const Layer layer(alone, plain.weights, host(), {.dtype = DType::f32});
  std::vector<float> want(at(spec.hidden));
  const Buffer workspace = host().allocate(layer.workspace_bytes(1));
  layer.forward({.hidden = hidden.tensor,
                 .ids = view(renamed.data(), {std::int64_t{1}, std::int64_t{k}}),
                 .weights = chosen.tensor},
                {.output = view(want.data(), {std::int64_t{1}, spec.hidden})}, workspace);

  float largest = 0;
  for (const float x : want) largest = std::max(largest, std::abs(x));
  for (std::int64_t i = 0; i < spec.hidden; ++i) {
    const float got = element(output.tensor, i);
    if (!(std::abs(got - want[at(i)]) <= tolerance * largest)) {
      differs(label, fmt::format("token {}, column {} is {}, not {}", token, i, got, want[at(i)]));
    }
  }
}

}  // namespace

void check_layer(const std::string& label, const LayerSpec& spec, const LayerWeights& weights,
                 const Context& context, const LayerCall& call, float tolerance) {
  if (call.valid == 0 || spec.route.shared.count > 0) return;
  for (const std::int64_t token : std::set<std::int64_t>{0, call.valid - 1}) {
    check_token(label, spec, weights, context, call, token, tolerance);
  }
}

}  // namespace shunt::tool
