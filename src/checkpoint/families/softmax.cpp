// Families that score with a softmax over all experts.
#include <cmath>
#include <set>

#include "checkpoint/families.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt::families {

namespace {

// block_sparse_moe.experts.{}.w1 (gate), w3 (up), w2 (down); merged: mlp.experts.gate_up_proj.
TensorNames mixtral_names() {
  TensorNames names;
  for (const char* module : {"block_sparse_moe", "mlp"}) {
    const std::string m = module;
    names.router.push_back({m + ".gate.weight"});
    names.experts.push_back(each_expert(m + ".experts.{}", "w1", "w3", "w2"));
    names.experts.push_back(merged_experts(m + ".experts"));
  }
  return names;
}

void qwen_shared(Plan& plan, Config& c) {
  add_shared(plan, c.integer({"shared_expert_intermediate_size"}, 1, max_width),
             "mlp.shared_expert");
  plan.spec.shared.sigmoid_gate = true;
  plan.names.shared_gate = {{"mlp.shared_expert_gate.weight"}};
}

// As many of each group of consecutive experts.
void of_each_group(Plan& plan, Config& c, const char* name, std::int64_t count) {
  RouteSpec& route = plan.spec.route;
  if (count <= 1) return;
  if (route.experts % count != 0 || route.top_k % count != 0) {
    fail(Status::bad_file, "{}: {} is {}: must divide the {} experts and the {} that a token has",
         c.where(), name, count, route.experts, route.top_k);
  }
  route.groups = {.count = static_cast<int>(count),
                  .keep = static_cast<int>(count),
                  .limit = route.top_k / static_cast<int>(count)};
}

Plan qwen(Config& c, bool renormalize_absent) {
  Plan plan = start(c, {});
  route_softmax(plan, c.flag_or({"norm_topk_prob"}, renormalize_absent));
  of_each_group(plan, c, "router_n_groups",
                c.integer_or({"router_n_groups"}, -1, -1, 64));  // Intern-S1-Pro
  layers_by_step(plan, c);
  return plan;
}

}  // namespace

Plan mixtral(Config& c) {
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  route_softmax(plan, true);
  plan.names = mixtral_names();
  return plan;
}

Plan minimax(Config& c) {
  Plan plan = mixtral(c);
  c.expect("shared_intermediate_size", {0});
  c.ignore({"shared_moe_mode", "mlp_alpha_factor", "mlp_beta_factor", "layernorm_mlp_alpha",
            "layernorm_mlp_beta"});
  plan.beside = "the decoder layer's mlp_alpha_factor and mlp_beta_factor";
  return plan;
}

Plan qwen2_moe(Config& c) {
  Plan plan = qwen(c, false);
  qwen_shared(plan, c);
  return plan;
}

Plan qwen3_moe(Config& c) {
  c.expect("shared_expert_intermediate_size", {0});
  return qwen(c, false);
}

// No default of its own.
Plan sdar_moe(Config& c) {
  if (!c.has("norm_topk_prob")) c.refuse("norm_topk_prob", "true or false");
  return qwen3_moe(c);
}

Plan rnd1(Config& c) {
  c.expect("norm_topk_prob", {true});
  c.expect("shared_expert_intermediate_size", {0});
  return qwen(c, true);
}

// Mixture of grouped experts: the best of each of k groups, weighed by p and a scale of its own.
Plan pangu_pro_moe(Config& c) {
  Plan plan = start(c, {});
  route_softmax(plan, false);
  of_each_group(plan, c, "num_experts_per_tok", plan.spec.route.top_k);
  c.expect("num_voted_experts", {8});
  plan.spec.route.per_expert_scale = true;
  plan.names.per_expert_scale = {{.name = "mlp.router_scale", .row = 0}};
  add_shared(plan, c.integer({"shared_expert_intermediate_size"}, 1, max_width),
             "mlp.shared_expert");
  return plan;
}

// Never renormalised, whatever norm_topk_prob says.
Plan llada_moe(Config& c) {
  Plan plan = start(c, {.intermediate = {"expert_intermediate_size"}});
  route_softmax(plan, false);
  c.ignore({"norm_topk_prob", "dense_intermediate_size"});
  c.expect("moe_router_score_function", {"softmax"});
  c.expect_false({"moe_router_enable_expert_bias"});
  c.expect("shared_expert_intermediate_size", {0});
  c.expect("router_num_group", {0, 1});
  c.expect("router_topk_group", {0, 1});
  c.expect("routed_scaling_factor", {1, 1.0});
  const auto sparse = c.integers({"moe_layer_freq"}, 0, 1);
  if (sparse && sparse->size() < plan.layers.size()) {
    c.refuse("moe_layer_freq", "a list with 0 or 1 for each layer");
  }
  layers_by(
      plan, [&](int i) { return !sparse || (*sparse)[static_cast<std::size_t>(i)] == 1; },
      "dense MLP");
  return plan;
}

Plan iquest_q1(Config& c) {
  c.ignore({"dense_intermediate_size"});
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  route_softmax(plan, true);
  c.expect("norm_topk_prob", {true});
  const auto dense = c.integers({"mlp_only_layers"}, 0, max_layers);
  const std::set<std::int64_t> listed =
      dense ? std::set<std::int64_t>(dense->begin(), dense->end()) : std::set<std::int64_t>{0};
  layers_by(
      plan, [&](int i) { return !listed.contains(i); }, "dense MLP");
  plan.names.experts = {merged_experts("mlp.experts", "fc", "proj")};
  plan.beside = "the scale of the block's output";
  return plan;
}

Plan qwen3_next(Config& c) {
  Plan plan = qwen(c, true);
  qwen_shared(plan, c);
  return plan;
}

// The shared expert is added as it is, and every layer is sparse.
Plan lara_mini(Config& c) {
  Plan plan = start(c, {});
  route_softmax(plan, c.flag_or({"norm_topk_prob"}, true));
  add_shared(plan, c.integer_or({"shared_expert_intermediate_size"}, 512, 1, max_width),
             "mlp.shared_expert");
  c.ignore({"decoder_sparse_step", "mlp_only_layers"});  // read by nobody
  return plan;
}

Plan qwen3_vl_moe(Config& c) {
  c.expect("norm_topk_prob", {true});
  c.expect("shared_expert_intermediate_size", {0});
  Plan plan = qwen(c, true);
  // Published: [E, H, 2I]; saved by transformers 5: [E, 2I, H].
  plan.names.experts[1].inner = ExpertNames::Inner::either;
  return plan;
}

Plan qwen3_5_moe(Config& c) {
  c.expect("norm_topk_prob", {true});
  return qwen3_next(c);
}

Plan qwen3_omni_moe(Config& c) {
  c.expect("shared_expert_intermediate_size", {0});
  return qwen(c, true);
}

Plan mellum(Config& c) {
  Plan plan = start(c, {});
  route_softmax(plan, c.flag_or({"norm_topk_prob"}, true));
  layers_by_type(plan, c, from(0));
  return plan;
}

Plan olmoe(Config& c) {
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  route_softmax(plan, c.flag_or({"norm_topk_prob"}, false));
  return plan;
}

Plan hunyuan_v1_moe(Config& c) {
  const std::int64_t layers = c.integer({"num_hidden_layers"}, 1, max_layers);
  const auto experts =
      c.integer_per_layer({"num_experts", "num_local_experts"}, layers, 1, max_experts);
  const auto top_k =
      c.integer_per_layer({"moe_topk", "num_experts_per_tok"}, layers, 1, max_choices);
  for (std::size_t i = 0; i < static_cast<std::size_t>(layers); ++i) {
    if (experts[i] != experts[0]) {
      fail(Status::unsupported,
           "{}: num_experts is {} in layer 0 and {} in layer {}: must be equal", c.where(),
           experts[0], experts[i], i);
    }
    if (top_k[i] > experts[i]) {
      fail(Status::bad_file,
           "{}: moe_topk is {} in layer {}: must be at most the number of experts, {}", c.where(),
           top_k[i], i, experts[i]);
    }
  }
  const std::int64_t intermediate = c.integer({"intermediate_size"}, 1, max_width);
  Plan plan = start(c, {.top_k = {"moe_topk"}}, experts[0], top_k[0], intermediate);
  route_softmax(plan, true);
  plan.per_layer = [top_k](int layer, LayerSpec& spec) {
    spec.route.top_k = static_cast<int>(top_k[static_cast<std::size_t>(layer)]);
  };
  // Published configs repeat these per layer; transformers computes with intermediate_size and one
  // shared MLP whatever they say.
  if (c.has("moe_intermediate_size")) {
    for (const std::int64_t width :
         c.integer_per_layer({"moe_intermediate_size"}, layers, 1, max_width)) {
      if (width != intermediate) c.refuse("moe_intermediate_size", "intermediate_size everywhere");
    }
  }
  if (c.has("num_shared_expert")) {
    for (const std::int64_t count : c.integer_per_layer({"num_shared_expert"}, layers, 0, 1024)) {
      if (count != 1) c.refuse("num_shared_expert", "1 everywhere");
    }
  }
  c.expect("norm_topk_prob", {true});
  c.expect("use_mixed_mlp_moe", {true});
  c.expect("moe_layer_num_skipped", {0});
  c.expect("n_group", {false, 1});
  c.expect("topk_group", {false, 1});
  c.expect("routed_scaling_factor", {false, 1, 1.0});
  c.expect_false({"group_limited_greedy", "moe_drop_tokens"});
  c.ignore({"capacity_factor", "moe_random_routing_dropped_token", "dense_list"});
  plan.names.router = {{"mlp.gate.wg.weight"}};
  add_shared(plan, intermediate, "mlp.shared_mlp");
  return plan;
}

namespace {

// ERNIE: softmax, selection by score + bias, the sum of the weights floored.
void ernie_route(Plan& plan, Config& c) {
  RouteSpec& route = plan.spec.route;
  route_softmax(plan, true);
  route.selection_bias = true;
  route.epsilon_rule = EpsilonRule::floor;
  route.renormalize_epsilon = static_cast<float>(c.number_or({"moe_norm_min"}, 1e-12, 1e-37, 1));
  c.expect("use_bias", {false});
  c.expect("moe_gate", {"topk"});
  c.expect("moe_use_aux_free", {true});
  c.expect("moe_group_experts", {false});
  c.expect("moe_use_hard_gate", {false});
  c.ignore({"moe_capacity", "moe_aux_loss_lambda", "moe_orthogonal_loss_lambda",
            "moe_z_loss_lambda", "moe_all_to_all_dropout", "moe_dropout_prob", "moe_group",
            "moe_multimodal_dispatch_use_allgather"});
}

// Published: experts 0 .. E-1 are the text's, E .. 2E-1 the vision's, and their biases rows 0, 1.
void ernie_vl_names(Plan& plan) {
  plan.names.router = {{.name = "mlp.text_moe.gate.weight"},
                       {.name = "mlp.gate.weight", .transposed = true}};
  plan.names.selection_bias = {{.name = "mlp.text_moe.gate.moe_statics.e_score_correction_bias"},
                               {.name = "mlp.moe_statics.e_score_correction_bias", .row = 0}};
  plan.names.experts = {merged_experts("mlp.text_moe.experts"), each_expert("mlp.experts.{}")};
  plan.beside = "the experts of vision tokens";
  plan.names.others_beside = true;
}

}  // namespace

Plan ernie4_5_moe(Config& c) {
  Plan plan = start(c, {.experts = {"moe_num_experts", "num_experts"},
                        .top_k = {"moe_k", "num_experts_per_tok"}});
  ernie_route(plan, c);
  add_shared_count(plan, c, {"moe_num_shared_experts"}, 2, "mlp.shared_experts");
  const std::int64_t first = c.integer_or({"moe_layer_start_index"}, 1, 0, max_layers);
  const std::int64_t end = c.integer_or({"moe_layer_end_index"}, -1, -1, max_layers);
  const std::int64_t last = end == -1 ? static_cast<std::int64_t>(plan.layers.size()) - 1 : end;
  const std::int64_t interval = c.integer_or({"moe_layer_interval"}, 1, 1, max_layers);
  layers_by(
      plan, [&](int i) { return (i + 1) % interval == 0 && i >= first && i <= last; }, "dense MLP");
  plan.names.selection_bias = {{"mlp.moe_statics.e_score_correction_bias"},
                               {"mlp.gate.moe_statics.e_score_correction_bias"}};
  return plan;
}

Plan ernie4_5_vl_moe(Config& c) {
  const auto widths = c.integers({"moe_intermediate_size"}, 1, max_width);
  if (!widths || widths->size() != 2) {
    c.refuse("moe_intermediate_size", "two widths, of the text and the vision experts");
  }
  const std::int64_t experts = c.integer({"moe_num_experts", "num_experts"}, 1, max_experts);
  const std::int64_t top_k = c.integer({"moe_k", "num_experts_per_tok"}, 1, max_choices);
  Plan plan = start(c, {.top_k = {"moe_k"}}, experts, top_k, (*widths)[0]);
  ernie_route(plan, c);
  add_shared_count(plan, c, {"moe_num_shared_experts"}, 2, "mlp.shared_experts");
  layers_by_type(plan, c, from(1));
  ernie_vl_names(plan);
  return plan;
}

namespace {
// A number, or two of which the first is the text's.
std::int64_t of_text(Config& c, const char* name, std::int64_t absent, std::int64_t low,
                     std::int64_t high) {
  if (!c.is_list(name)) return c.integer_or({name}, absent, low, high);
  const auto both = c.integers({name}, low, high);
  if (!both || both->size() != 2)
    c.refuse(name, "a number, or two, of the text and the vision experts");
  return (*both)[0];
}
}  // namespace

// ERNIE 4.5 VL by its first words: no model within the model, and pairs of numbers.
Plan ernie4_5_moe_vl(Config& c) {
  const std::int64_t experts = of_text(c, "moe_num_experts", 0, 1, max_experts);
  const std::int64_t width = of_text(c, "moe_intermediate_size", 0, 1, max_width);
  const std::int64_t top_k = c.integer({"moe_k"}, 1, max_choices);
  if (experts == 0 || width == 0) {
    c.refuse(experts == 0 ? "moe_num_experts" : "moe_intermediate_size", "two numbers");
  }
  Plan plan = start(c, {.top_k = {"moe_k"}}, experts, top_k, width);
  ernie_route(plan, c);
  add_shared_count(plan, c, {"moe_num_shared_experts"}, 2, "mlp.shared_experts");
  const std::int64_t first = of_text(c, "moe_layer_start_index", 1, 0, max_layers);
  const std::int64_t end = of_text(c, "moe_layer_end_index", -1, -1, max_layers);
  const std::int64_t last = end == -1 ? static_cast<std::int64_t>(plan.layers.size()) - 1 : end;
  const std::int64_t interval = of_text(c, "moe_layer_interval", 1, 1, max_layers);
  layers_by(
      plan, [&](int i) { return (i + 1) % interval == 0 && i >= first && i <= last; }, "dense MLP");
  ernie_vl_names(plan);
  return plan;
}

Plan jamba(Config& c) {
  Plan plan = start(c, {.intermediate = {"intermediate_size"}});
  route_softmax(plan, false);
  const std::int64_t period = c.integer_or({"expert_layer_period"}, 2, 1, max_layers);
  const std::int64_t offset = c.integer_or({"expert_layer_offset"}, 1, 0, max_layers);
  const bool any = plan.spec.route.experts > 1;
  layers_by(
      plan, [&](int i) { return any && i % period == offset; }, "dense MLP");
  plan.names = standard_names("feed_forward");
  plan.names.router = {{"feed_forward.router.weight"}};
  return plan;
}

Plan dbrx(Config& c) {
  const nlohmann::json* object = c.object("ffn_config");
  if (object == nullptr) c.refuse("ffn_config", "an object");
  Config f(c.where() + ": ffn_config", *object);
  const std::int64_t experts = f.integer({"moe_num_experts"}, 1, max_experts);
  const std::int64_t top_k = f.integer({"moe_top_k"}, 1, max_choices);
  const std::int64_t intermediate = f.integer({"ffn_hidden_size"}, 1, max_width);
  Plan plan = start(c,
                    {.top_k = {"moe_top_k"},
                     .hidden = {"d_model", "hidden_size"},
                     .layers = {"n_layers", "num_hidden_layers"},
                     .act_field = ""},
                    experts, top_k, intermediate);
  if (const nlohmann::json* act = f.object("ffn_act_fn")) {
    Config a(f.where() + ".ffn_act_fn", *act);
    plan.spec.experts.activation = activation_by_name(a, "name", a.text_or({"name"}, "silu"));
  }
  // The weights' p-norm; of p = 1 it is their sum.
  const bool none = f.is_null("moe_normalize_expert_weights");
  f.expect("moe_normalize_expert_weights", {1, 1.0});
  route_softmax(plan, !none);
  f.ignore({"moe_jitter_eps", "moe_loss_weight", "hidden_size"});
  f.finish("dbrx");
  TensorNames& names = plan.names;
  names.stack = "blocks";
  names.module = "ffn";
  names.router = {{"ffn.router.layer.weight"}};
  names.experts = {{.form = ExpertNames::Form::flat,
                    .gate = "ffn.experts.mlp.w1",
                    .up = "ffn.experts.mlp.v1",
                    .down = "ffn.experts.mlp.w2"}};
  return plan;
}

Plan longcat_flash(Config& c) {
  const std::int64_t computed = c.integer({"n_routed_experts"}, 1, max_experts);
  const std::int64_t zero = c.integer_or({"zero_expert_num"}, 256, 0, max_experts - computed);
  const std::int64_t top_k = c.integer({"moe_topk", "num_experts_per_tok"}, 1, max_choices);
  const std::int64_t intermediate = c.integer({"expert_ffn_hidden_size"}, 1, max_width);
  // A layer of LongCat is two attentions and two dense MLPs, with one MoE across.
  Plan plan = start(c, {.top_k = {"moe_topk"}, .layers = {"num_layers"}}, computed + zero, top_k,
                    intermediate);
  plan.spec.zero_experts = static_cast<int>(zero);
  plan.spec.experts.experts = static_cast<int>(computed);
  route_softmax(plan, false);
  plan.spec.route.selection_bias = true;
  plan.spec.route.scale =
      static_cast<float>(c.number_or({"routed_scaling_factor"}, 6.0, -1e30, 1e30));
  c.expect_false({"norm_topk_prob", "router_bias"});
  c.expect("zero_expert_type", {"identity"});
  c.ignore({"ffn_hidden_size"});
  plan.names.router = {{"mlp.router.classifier.weight"}};
  plan.names.selection_bias = {{"mlp.router.e_score_correction_bias"}};
  plan.beside = "the layer's two dense MLPs";
  return plan;
}

Plan gemma4(Config& c) {
  if (!c.flag_or({"enable_moe_block"}, false)) {
    fail(Status::unsupported, "{}: enable_moe_block is not true: the model has no MoE blocks",
         c.where());
  }
  Plan plan = start(c, {.experts = {"num_experts"}, .top_k = {"top_k_experts"}, .act_field = ""});
  LayerSpec& spec = plan.spec;
  spec.experts.activation = activation_by_name(
      c, "hidden_activation", c.text_or({"hidden_activation"}, "gelu_pytorch_tanh"));
  route_softmax(plan, true);
  spec.route.per_expert_scale = true;
  const auto epsilon = static_cast<float>(c.number_or({"rms_norm_eps"}, 1e-6, 0, 1));
  spec.router_norm = {.enabled = true,
                      .epsilon = epsilon,
                      .weight = true,
                      .multiplier = 1 / std::sqrt(static_cast<float>(spec.hidden))};
  spec.input_norm = {.enabled = true, .epsilon = epsilon, .weight = true, .multiplier = 1};
  c.ignore({"use_double_wide_mlp", "num_kv_shared_layers"});
  TensorNames& names = plan.names;
  names.module = "moe";  // transformers has no module for it
  names.router = {{"router.proj.weight"}};
  names.per_expert_scale = {{"router.per_expert_scale"}};
  names.router_norm = {{"router.scale"}};
  names.input_norm = {{"pre_feedforward_layernorm_2.weight"}};
  names.experts = {merged_experts("experts")};
  plan.beside = "the layer's dense MLP, and the norm of the experts' sum";
  return plan;
}

}  // namespace shunt::families
