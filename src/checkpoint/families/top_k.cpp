// Families that take the best logits first and score those alone.
#include <set>

#include "checkpoint/families.hpp"
#include "core/check.hpp"

namespace shunt::families {

namespace {

// gpt-oss: router and experts with biases, clamped SwiGLU, matrices stored [in, out].
Plan oai(Config& c, bool interleaved) {
  Plan plan = start(c, {.experts = {"num_local_experts", "num_experts"},
                        .top_k = {"num_experts_per_tok", "experts_per_token"},
                        .intermediate = {"intermediate_size"}});
  LayerSpec& spec = plan.spec;
  route_top_k_softmax(plan);
  spec.route.router_bias = true;
  spec.experts.activation = {
      .alpha = static_cast<float>(c.number_or({"swiglu_alpha"}, 1.702, -1e30, 1e30)),
      .limit = static_cast<float>(c.number_or({"swiglu_limit"}, 7, 1e-6, 1e30)),
      .up_offset = 1};
  spec.experts.gate_up_bias = true;
  spec.experts.down_bias = true;
  TensorNames& names = plan.names;
  names.router = {{"mlp.router.weight"}};
  names.router_bias = {{"mlp.router.bias"}};
  names.experts = {{.form = ExpertNames::Form::merged,
                    .gate = {},
                    .up = "mlp.experts.gate_up_proj",
                    .down = "mlp.experts.down_proj",
                    .up_bias = "mlp.experts.gate_up_proj_bias",
                    .down_bias = "mlp.experts.down_proj_bias",
                    .inner = ExpertNames::Inner::first,
                    .interleaved = interleaved}};
  return plan;
}

// input_linear [E, 2I, H], output_linear [E, H, I], router.layer.
TensorNames linear_names(const std::string& module) {
  TensorNames names;
  names.module = module;
  names.router = {{module + ".router.layer.weight"}, {module + ".router.weight"}};
  names.experts = {merged_experts(module, "input_linear.weight", "output_linear.weight"),
                   merged_experts(module + ".experts")};
  return names;
}

}  // namespace

Plan gpt_oss(Config& c) { return oai(c, true); }

Plan openai_privacy_filter(Config& c) { return oai(c, false); }

Plan granitemoe(Config& c) {
  Plan plan = start(c, {.experts = {"num_local_experts"}, .intermediate = {"intermediate_size"}});
  route_top_k_softmax(plan);
  plan.names = linear_names("block_sparse_moe");
  if (c.integer_or({"shared_intermediate_size"}, 0, 0, max_width) > 0) {
    plan.beside = "the layer's shared_mlp";
  }
  return plan;
}

Plan granitemoehybrid(Config& c) {
  if (c.integer({"num_local_experts"}, 0, max_experts) > 0) return granitemoe(c);
  // The dense members of the family: every layer has its shared MLP alone.
  return without_experts(c, {"num_experts_per_tok", "shared_intermediate_size"});
}

Plan jetmoe(Config& c) {
  Plan plan = start(c, {.experts = {"num_local_experts"},
                        .intermediate = {"intermediate_size"},
                        .act_field = "activation_function"});
  route_top_k_softmax(plan);
  plan.spec.output_bias = true;
  plan.names = linear_names("mlp");
  plan.names.output_bias = {{"mlp.bias"}};
  plan.beside = "the mixture of attention heads";
  return plan;
}

Plan aria(Config& c) {
  Plan plan = start(c, {.experts = {"moe_num_experts"},
                        .top_k = {"moe_topk"},
                        .intermediate = {"intermediate_size"}});
  route_top_k_softmax(plan);
  add_shared_count(plan, c, {"moe_num_shared_experts"}, 2, "mlp.shared_experts");
  plan.spec.experts.activation = {};  // SiLU whatever hidden_act says of the shared experts
  c.expect("moe_intermediate_size", {plan.spec.experts.intermediate});
  c.ignore({"moe_z_loss_coeff", "moe_aux_loss_coeff"});
  plan.names.router = {{"mlp.router.weight"}};
  plan.names.experts = {merged_experts("mlp.experts", "fc1.weight", "fc2.weight"),
                        merged_experts("mlp.experts")};
  for (ExpertNames& names : plan.names.experts) names.inner = ExpertNames::Inner::first;
  return plan;
}

Plan cohere2_moe(Config& c) {
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  RouteSpec& route = plan.spec.route;
  const std::string score = c.text_or({"expert_selection_fn"}, "softmax");
  const bool renormalize = c.flag_or({"norm_topk_prob"}, true);
  route.score_stage = ScoreStage::after_top_k;
  if (score == "softmax") {
    route.score = Score::softmax;
  } else if (score == "sigmoid") {
    route.score = Score::sigmoid;
    route.renormalize = renormalize;
    route.renormalize_epsilon = 0;
  } else {
    c.refuse("expert_selection_fn", "softmax or sigmoid");
  }
  add_shared_count(plan, c, {"num_shared_experts"}, 0, "mlp.shared_experts");
  const std::string strategy = c.text_or({"shared_expert_combination_strategy"}, "average");
  if (strategy != "average" && strategy != "sum") {
    c.refuse("shared_expert_combination_strategy", "average or sum");
  }
  if (plan.spec.shared.intermediate > 0 && strategy == "average") {
    route.scale = 0.5f;
    plan.spec.shared.scale = 0.5f;
  }
  c.ignore({"prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern"});
  layers_by_type(plan, c, from(c.integer_or({"first_k_dense_replace"}, 0, 0, max_layers)));
  return plan;
}

Plan phimoe(Config& c) {
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  RouteSpec& route = plan.spec.route;
  // The model's code takes two experts whatever the config says.
  if (route.top_k != 2) c.refuse("num_experts_per_tok", "2");
  route.score = Score::sparsemixer;
  route.jitter = static_cast<float>(c.number_or({"router_jitter_noise"}, 0.01, 0, 1e30));
  plan.names.router = {{"block_sparse_moe.gate.weight"}, {"mlp.router.weight"}};
  plan.names.experts = {each_expert("block_sparse_moe.experts.{}", "w1", "w3", "w2"),
                        merged_experts("mlp.experts")};
  return plan;
}

Plan llama4(Config& c) {
  Plan plan = start(c, {.experts = {"num_local_experts"}, .intermediate = {"intermediate_size"}});
  RouteSpec& route = plan.spec.route;
  route.score = Score::sigmoid;
  route.score_stage = ScoreStage::after_top_k;
  route.weight_on_input = true;
  add_shared(plan, plan.spec.experts.intermediate, "feed_forward.shared_expert");
  const std::int64_t step = c.integer_or({"interleave_moe_layer_step"}, 1, 0, max_layers);
  if (const auto list = c.integers({"moe_layers"}, 0, max_layers)) {
    const std::set<std::int64_t> moe(list->begin(), list->end());
    layers_by(
        plan, [&](int i) { return moe.contains(i); }, "dense MLP");
  } else {
    layers_by(
        plan, [&](int i) { return step > 0 && (i + 1) % step == 0; }, "dense MLP");
  }
  c.ignore({"intermediate_size_mlp"});
  TensorNames& names = plan.names;
  names.module = "feed_forward";
  names.router = {{"feed_forward.router.weight"}};
  // Published: [E, H, 2I]; quantised by compressed-tensors: a tensor an expert.
  names.experts = {merged_experts("feed_forward.experts"), each_expert("feed_forward.experts.{}")};
  names.experts[0].inner = ExpertNames::Inner::first;
  return plan;
}

}  // namespace shunt::families
