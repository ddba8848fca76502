// Families whose code is not in transformers: their publishers', beside the checkpoint, or
// engines'.
#include <cmath>

#include "checkpoint/families.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt::families {

namespace {

// xAI's weights of the experts are their p, and its GELU is JAX's, by tanh (engines have erf in
// places). A config that names an activation means what transformers calls so.
Plan grok(Config& c, const Config::Names& intermediate, double soft_cap) {
  Plan plan = start(c, {.experts = {"num_experts", "num_local_experts"},
                        .intermediate = intermediate,
                        .act_field = ""});
  plan.spec.experts.activation =
      activation_by_name(c, "hidden_act", c.text_or({"hidden_act"}, "gelu_pytorch_tanh"));
  route_softmax(plan, c.flag_or({"moe_router_renormalize", "moe_renormalize"}, false));
  plan.spec.route.soft_cap =
      static_cast<float>(c.number_or({"router_logit_softcapping"}, soft_cap, 0, 1e30));
  c.ignore({"load_presharded_moe"});
  return plan;
}

}  // namespace

// As HPC-AI Tech stores it. Engines cap the router's logits at 30: neither xAI's code nor the one
// beside this checkpoint does.
Plan grok1(Config& c) {
  c.expect_false({"residual_moe"});
  Plan plan = grok(c, {"intermediate_size"}, 0);
  TensorNames& names = plan.names;
  names = {};
  names.module = "moe_block";
  names.router = {{"moe_block.gate.weight"}};
  names.experts = {each_expert("moe_block.experts.{}", "linear", "linear_v", "linear_1")};
  return plan;
}

// Half of each layer is a dense MLP of the same input: y = (experts + mlp) / sqrt(2).
Plan grok2(Config& c) {
  if (!c.element_is("architectures", 0, "Grok1ForCausalLM")) {
    fail(Status::unsupported,
         "{}: model_type is 'git': has experts only as Grok 2, whose architectures is "
         "[\"Grok1ForCausalLM\"]",
         c.where());
  }
  const bool residual = c.flag_or({"residual_moe"}, false);
  const bool apart = c.has("moe_intermediate_size");
  Plan plan = grok(c, {apart ? "moe_intermediate_size" : "intermediate_size"}, 30);
  TensorNames& names = plan.names;
  names = {};
  names.module = "block_sparse_moe";
  names.router = {{"block_sparse_moe.gate.weight"}};
  names.experts = {each_expert("block_sparse_moe.experts.{}", "w1", "w3", "w2")};
  if (residual) {
    add_shared(plan, c.integer({"intermediate_size"}, 1, max_width), "mlp");
    plan.spec.route.scale = plan.spec.shared.scale = static_cast<float>(std::sqrt(0.5));
  }
  return plan;
}

// Mixtral's block. The dense MLP that is beside it in its layer reads another input.
Plan arctic(Config& c) {
  Plan plan = start(c, {.experts = {"num_local_experts"}, .intermediate = {"intermediate_size"}});
  route_softmax(plan, true);
  // vLLM leaves the weight of a single expert p, Snowflake's own code makes it 1.
  if (plan.spec.route.top_k == 1) c.refuse("num_experts_per_tok", "2 or more");
  const std::int64_t every = c.integer_or({"moe_layer_frequency"}, 2, 1, max_layers);
  layers_by(
      plan, [&](int i) { return (i + 1) % every == 0; }, "dense MLP");
  // Of DeepSpeed's training, whose experts have a capacity.
  c.ignore({"moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity",
            "moe_token_dropping", "enable_expert_tensor_parallelism"});
  const bool beside = c.flag_or({"parallel_attn_mlp_res", "use_residual"}, false);
  TensorNames& names = plan.names;
  names = {};
  names.module = "block_sparse_moe";
  names.router = {{"block_sparse_moe.gate.weight"}};
  names.experts = {each_expert("block_sparse_moe.experts.{}", "w1", "w3", "w2")};
  if (beside) plan.beside = "the layer's residual_mlp, of another input";
  return plan;
}

// Most of the family has no experts.
Plan minicpm(Config& c) {
  if (c.integer_or({"num_experts"}, 0, 0, max_experts) == 0) {
    return without_experts(c, {"num_experts_per_tok"});
  }
  Plan plan = start(c, {.experts = {"num_experts"}, .intermediate = {"intermediate_size"}});
  route_softmax(plan, true);
  plan.names.experts = {each_expert("mlp.experts.{}", "w1", "w3", "w2")};
  plan.beside = "the scale of the block's output";
  return plan;
}

// Likewise. intermediate_size is an expert's.
Plan xverse(Config& c) {
  if (c.integer_or({"num_experts"}, 0, 0, max_experts) == 0) {
    return without_experts(c, {"moe_top_k", "num_shared_experts"});
  }
  Plan plan = start(
      c,
      {.experts = {"num_experts"}, .top_k = {"moe_top_k"}, .intermediate = {"intermediate_size"}});
  route_softmax(plan, true);
  plan.spec.route.renormalize_epsilon = 1e-6f;
  c.expect("norm_topk_prob", {true});
  add_shared_count(plan, c, {"num_shared_experts"}, 0, "mlp.shared_experts");
  plan.names.router = {{"mlp.router.weight"}};
  plan.names.experts = {each_expert("mlp.experts.{}")};
  return plan;
}

// The router reads the layer's input, from before attention, which the block does not see. ReLU in
// place of SiLU, whatever the config says.
Plan smallthinker(Config& c) {
  Plan plan = start(c, {.experts = {"moe_num_primary_experts"},
                        .top_k = {"moe_num_active_primary_experts", "num_experts_per_tok"},
                        .intermediate = {"moe_ffn_hidden_size", "moe_intermediate_size"},
                        .act_field = ""});
  plan.spec.experts.activation.kind = Activation::relu;
  if (c.flag_or({"moe_primary_router_apply_softmax"}, false)) {
    route_top_k_softmax(plan);
  } else {
    RouteSpec& route = plan.spec.route;
    route.score = Score::sigmoid;
    route.score_stage = ScoreStage::after_top_k;
    route.renormalize = true;
    route.renormalize_epsilon = 0;
  }
  c.expect("norm_topk_prob", {true});
  c.expect("moe_enable_early_router", {true});
  c.expect("moe_shared_primary_experts", {0});
  c.expect_false({"moe_enable_secondary_experts"});
  c.integers({"moe_layer_layout"}, 1, 1);
  c.ignore({"hidden_act", "dense_ffn_hidden_size", "moe_num_secondary_experts",
            "moe_secondary_expert_size"});
  TensorNames& names = plan.names;
  names = {};
  names.module = "block_sparse_moe";
  names.router = {{"block_sparse_moe.primary_router.weight"}};
  names.router_apart = true;
  names.experts = {each_expert("block_sparse_moe.experts.{}", "gate", "up", "down")};
  plan.beside = "its router, which reads the layer's input: calls give its logits";
  return plan;
}

}  // namespace shunt::families
