// Random weights for any LayerSpec, kept alive by this object.
#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "layer/reference.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"
#include "shunt/layer.hpp"

namespace shunt::testing {

class RandomLayer {
 public:
  // Weights are exact in bf16 (and so in f32), of `dtype` where that is 16 bits wide. `apart`, if
  // not 0: rows of a weight begin so many numbers apart and overlap, so that large ones take little
  // memory and time.
  RandomLayer(const LayerSpec& layer_spec, unsigned seed, DType dtype = DType::bf16,
              std::int64_t apart = 0)
      : spec(layer_spec), random_(seed), dtype_(dtype), apart_(apart) {
    const RouteSpec& route = spec.route;
    const std::int64_t hidden = spec.hidden;
    const float in = 1.0f / std::sqrt(static_cast<float>(hidden));
    weights.router = matrix(route.columns(), hidden, 2 * in);
    if (route.router_bias) weights.router_bias = vector(route.columns(), 0.3f);
    if (route.selection_bias) weights.selection_bias = vector(route.experts, 0.1f, DType::f32);
    if (route.per_expert_scale) weights.per_expert_scale = vector(route.columns(), 1.0f);
    if (route.hashed) {
      weights.hash_table = table(hash_rows, route.top_k, route.experts);
    }
    fill(weights.experts, spec.experts.experts, spec.experts.hidden, spec.experts.intermediate,
         spec.experts.activation.gated, spec.experts.gate_up_bias, spec.experts.down_bias);
    if (spec.shared.intermediate > 0) {
      fill(weights.shared, 1, hidden, spec.shared.intermediate, spec.shared.activation.gated,
           spec.shared.gate_up_bias, spec.shared.down_bias);
      if (spec.shared.sigmoid_gate) weights.shared_gate = matrix(1, hidden, in);
    }
    if (spec.latent > 0) {
      weights.latent_down = matrix(spec.latent, hidden, in);
      weights.latent_up =
          matrix(hidden, spec.latent, 1.0f / std::sqrt(static_cast<float>(spec.latent)));
    }
    if (spec.output_bias) weights.output_bias = vector(hidden, 0.5f);
    if (spec.router_norm.weight) weights.router_norm = vector(hidden, 1.0f);
    if (spec.input_norm.weight) weights.input_norm = vector(hidden, 1.0f);
    if (spec.output_norm.weight) weights.output_norm = vector(hidden, 1.0f);
    if (spec.latent_norm.weight) weights.latent_norm = vector(spec.latent, 1.0f);
    if (spec.latent_input_norm.weight) weights.latent_input_norm = vector(spec.latent, 1.0f);
    if (spec.expert_norm.weight) weights.expert_norm = vector(spec.experts.hidden, 1.0f);
  }

  // [rows, columns] of `dtype`, normal.
  Tensor matrix(std::int64_t rows, std::int64_t columns, float deviation) {
    if (apart_ == 0 || apart_ >= columns) return tensor(rows, columns, deviation, dtype_);
    Tensor overlapping = tensor(1, (rows - 1) * apart_ + columns, deviation, dtype_);
    overlapping.shape[0] = rows;
    overlapping.shape[1] = columns;
    overlapping.strides[0] = apart_;
    return overlapping;
  }
  Tensor hidden_states(std::int64_t tokens, DType dtype = DType::f32) {
    return tensor(tokens, spec.hidden, 1.0f, dtype);
  }
  // The experts' matrices, or the shared one's, packed: gate and up in one format, down in another.
  void pack(ExpertWeights& experts, const FormatSpec& first, const FormatSpec& second) {
    const auto pack_all = [&](std::vector<Tensor>& from, std::vector<PackedMatrix>& to,
                              const FormatSpec& format) {
      for (const Tensor& matrix : from) {
        buffers_.push_back(
            cpu({.threads = 1}).allocate(packed_bytes(format, matrix.shape[0], matrix.shape[1])));
        to.push_back(shunt::pack(format, matrix, buffers_.back()));
      }
      from.clear();
    };
    pack_all(experts.gate, experts.packed_gate, first);
    pack_all(experts.up, experts.packed_up, first);
    pack_all(experts.down, experts.packed_down, second);
  }
  Tensor token_ids(std::int64_t tokens) {
    auto& data = ints_.emplace_back(static_cast<std::size_t>(tokens));
    for (auto& value : data) value = static_cast<std::int32_t>(random_() % hash_rows);
    return view(data.data(), {tokens});
  }

  static constexpr int hash_rows = 37;
  LayerSpec spec;
  LayerWeights weights;

 private:
  Tensor tensor(std::int64_t rows, std::int64_t columns, float deviation, DType dtype) {
    std::normal_distribution<float> normal(0, deviation);
    auto& data = bytes_.emplace_back(static_cast<std::size_t>(rows * columns * bits(dtype) / 8));
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      store_f32(data.data(), dtype, i, bf16_to_f32(f32_to_bf16(normal(random_))));
    }
    return view(data.data(), dtype, {rows, columns});
  }
  Tensor vector(std::int64_t size, float deviation, DType dtype = DType::bf16) {
    return tensor(1, size, deviation, dtype)[0];
  }
  Tensor table(std::int64_t rows, int k, int experts) {
    auto& data = ints_.emplace_back(static_cast<std::size_t>(rows * k));
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto first = static_cast<int>(random_() % static_cast<unsigned>(experts));
      for (int j = 0; j < k; ++j) {
        data[static_cast<std::size_t>(r * k + j)] = (first + j) % experts;
      }
    }
    return view(data.data(), {rows, k});
  }
  void fill(ExpertWeights& to, int count, std::int64_t hidden, std::int64_t intermediate,
            bool gated, bool gate_up_bias, bool down_bias) {
    const float in = 1.0f / std::sqrt(static_cast<float>(hidden));
    const float out = 1.0f / std::sqrt(static_cast<float>(intermediate));
    for (int e = 0; e < count; ++e) {
      if (gated) to.gate.push_back(matrix(intermediate, hidden, 2 * in));
      to.up.push_back(matrix(intermediate, hidden, 2 * in));
      to.down.push_back(matrix(hidden, intermediate, out));
      if (gate_up_bias && gated) to.gate_bias.push_back(vector(intermediate, 0.5f));
      if (gate_up_bias) to.up_bias.push_back(vector(intermediate, 0.5f));
      if (down_bias) to.down_bias.push_back(vector(hidden, 0.5f));
    }
  }

  std::mt19937 random_;
  DType dtype_;
  std::int64_t apart_;
  std::deque<std::vector<char>> bytes_;
  std::deque<Buffer> buffers_;
  std::deque<std::vector<std::int32_t>> ints_;
};

// The same weights where a context has its tensors, by `there`, a function of each.
template <class There>
LayerWeights moved(LayerWeights weights, const There& there) {
  for (Tensor* one :
       {&weights.router, &weights.router_bias, &weights.selection_bias, &weights.per_expert_scale,
        &weights.hash_table, &weights.shared_gate, &weights.latent_down, &weights.latent_up,
        &weights.output_bias, &weights.router_norm, &weights.input_norm, &weights.output_norm,
        &weights.latent_norm, &weights.latent_input_norm, &weights.expert_norm}) {
    *one = there(*one);
  }
  for (ExpertWeights* experts : {&weights.experts, &weights.shared}) {
    for (auto* list : {&experts->gate, &experts->up, &experts->down, &experts->gate_bias,
                       &experts->up_bias, &experts->down_bias}) {
      for (Tensor& one : *list) one = there(one);
    }
  }
  return weights;
}

// By how much of itself a number changes at most when experts' rows are rounded to a dtype.
inline double row_rounding(DType dtype) {
  return dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 0x1.01p-8 : 0x1.01p-11;
}

// [T, H]: times row_rounding(), how far that moves the layer's output at most. For the caller's ids
// and weights [T, k]; slots that are not his weigh the scale at most.
inline std::vector<double> spread_of_rows(const LayerSpec& spec, const LayerWeights& given,
                                          const Tensor& hidden,
                                          const std::vector<std::int32_t>& ids,
                                          const std::vector<float>& weights) {
  const RouteSpec& route = spec.route;
  std::vector<std::int32_t> all_ids;
  std::vector<float> all_weights;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    all_ids.push_back(ids[i]);
    all_weights.push_back(weights[i]);
    if ((i + 1) % static_cast<std::size_t>(route.top_k) != 0) continue;
    for (int s = 0; s < route.shared.count; ++s) {
      all_ids.push_back(route.experts + s);
      all_weights.push_back(route.scale);
    }
  }
  std::vector<double> spread;
  layer_reference(spec, given, hidden, all_ids.data(), all_weights.data(), &spread);
  return spread;
}

// Specs that between them use every part of a layer.
struct NamedSpec {
  const char* name;
  LayerSpec spec;
};

// Llama 4's rule.
inline RouteSpec weights_on_the_input(int top_k) {
  return {.experts = 6,
          .top_k = top_k,
          .score = Score::sigmoid,
          .score_stage = ScoreStage::after_top_k,
          .weight_on_input = true};
}

inline LayerSpec small_layer(RouteSpec route, std::int64_t hidden = 48,
                             std::int64_t intermediate = 40, ActivationSpec activation = {}) {
  return {.hidden = hidden,
          .route = route,
          .experts = {.experts = route.experts + route.shared.count,
                      .hidden = hidden,
                      .intermediate = intermediate,
                      .activation = activation}};
}

inline std::vector<NamedSpec> layer_specs() {
  std::vector<NamedSpec> specs;
  const RouteSpec mixtral{.experts = 8, .top_k = 2, .renormalize = true};
  specs.push_back({"Mixtral", small_layer(mixtral)});
  {
    LayerSpec s = small_layer({.experts = 13, .top_k = 4}, 64, 33);
    s.shared = {.intermediate = 70, .sigmoid_gate = true};
    specs.push_back({"Qwen2Moe", s});
  }
  {
    LayerSpec s =
        small_layer({.experts = 24,
                     .top_k = 5,
                     .score = Score::sigmoid,
                     .selection_bias = true,
                     .groups = {.count = 6, .keep = 3, .rank_by = GroupRank::sum_of_top_2},
                     .renormalize = true,
                     .scale = 2.5f},
                    50, 31);
    s.shared = {.intermediate = 31};
    specs.push_back({"DeepSeekV3", s});
  }
  {
    LayerSpec s = small_layer(
        {.experts = 9, .top_k = 4, .score_stage = ScoreStage::after_top_k, .router_bias = true}, 45,
        45, {.alpha = 1.702f, .limit = 0.7f, .up_offset = 1});
    s.experts.gate_up_bias = s.experts.down_bias = true;
    specs.push_back({"GptOss", s});
  }
  {
    LayerSpec s = small_layer(weights_on_the_input(1));
    s.shared = {.intermediate = 40};
    specs.push_back({"Llama4", s});
  }
  specs.push_back({"OnInput", small_layer(weights_on_the_input(2), 72, 56)});
  {
    LayerSpec s =
        small_layer({.experts = 12, .top_k = 4, .selection_bias = true, .scale = 6.0f}, 40, 24);
    s.zero_experts = 4;
    s.experts.experts = 8;
    specs.push_back({"LongCat", s});
  }
  {
    LayerSpec s = small_layer({.experts = 16,
                               .top_k = 6,
                               .score = Score::sigmoid,
                               .selection_bias = true,
                               .renormalize = true,
                               .scale = 5.0f},
                              72, 36, {.kind = Activation::relu2, .gated = false});
    s.latent = 24;
    s.experts.hidden = 24;
    s.shared = {.intermediate = 50, .activation = {.kind = Activation::relu2, .gated = false}};
    specs.push_back({"NemotronLatent", s});
  }
  {
    const ActivationSpec situ = {.kind = Activation::situ, .beta = 0.75f, .linear_beta = 1.5f};
    LayerSpec s = small_layer({.experts = 14,
                               .top_k = 6,
                               .score = Score::sigmoid,
                               .selection_bias = true,
                               .renormalize = true},
                              68, 36, situ);
    s.latent = s.experts.hidden = 40;
    s.latent_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
    s.shared = {.intermediate = 72, .activation = situ, .scale = 0.5f};
    specs.push_back({"KimiK3", s});
  }
  {
    LayerSpec s = small_layer({.experts = 12,
                               .top_k = 4,
                               .score = Score::sigmoid,
                               .selection_bias = true,
                               .renormalize = true,
                               .renormalize_epsilon = 1e-15f},
                              64, 34);
    s.latent = s.experts.hidden = 48;
    s.latent_input_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
    s.expert_norm = {.enabled = true, .epsilon = 1e-8f, .weight = true, .weight_first = true};
    specs.push_back({"MuseSpark", s});
  }
  {
    LayerSpec s = small_layer({.experts = 9, .top_k = 1, .renormalize = true}, 56, 40);
    s.expert_norm = {.enabled = true, .multiplier = 0.5f};
    specs.push_back({"NormedRows", s});
  }
  {
    LayerSpec s =
        small_layer({.experts = 7, .top_k = 3, .score_stage = ScoreStage::after_top_k}, 33, 30);
    s.output_bias = true;
    specs.push_back({"JetMoe", s});
  }
  {
    LayerSpec s =
        small_layer({.experts = 10, .top_k = 3, .renormalize = true, .per_expert_scale = true}, 56,
                    28, {.kind = Activation::gelu_tanh});
    s.router_norm = {.enabled = true, .weight = true, .multiplier = 0.13f};
    s.input_norm = {.enabled = true, .weight = true};
    s.output_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
    specs.push_back({"Gemma4", s});
  }
  specs.push_back({"Hashed", small_layer({.experts = 11,
                                          .top_k = 3,
                                          .score = Score::sqrt_softplus,
                                          .renormalize = true,
                                          .scale = 1.5f,
                                          .hashed = true},
                                         32, 20, {.limit = 1.0f})});
  specs.push_back(
      {"Inkling", small_layer({.experts = 10,
                               .top_k = 3,
                               .score = Score::sigmoid,
                               .selection_bias = true,
                               .renormalize = true,
                               .scale = 2.0f,
                               .shared = {.count = 2, .weight = SharedWeight::joint}})});
  {
    LayerSpec s = small_layer({.experts = 1, .top_k = 1, .renormalize = true}, 1, 1);
    specs.push_back({"OneByOne", s});
  }
  {
    LayerSpec s = small_layer({.experts = 5, .top_k = 5, .scale = 0.5f}, 130, 67,
                              {.limit = 0.5f, .limit_on = LimitOn::output});
    s.shared = {.intermediate = 65, .activation = {.kind = Activation::gelu}, .scale = 0.5f};
    specs.push_back({"AllExpertsStep", s});
  }
  return specs;
}

}  // namespace shunt::testing
