// Other families that score each expert by itself with a sigmoid.
#include <algorithm>
#include <optional>
#include <set>

#include "checkpoint/families.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt::families {

namespace {

double scale_of(Config& c, const char* name, double absent) {
  return c.number_or({name}, absent, -1e30, 1e30);
}

}  // namespace

Plan hy_v3(Config& c) {
  Plan plan = start(c, {.intermediate = {"moe_intermediate_size", "expert_hidden_dim"}});
  route_sigmoid_bias(plan, true, 1e-20, scale_of(c, "router_scaling_factor", 2.826));
  add_shared_count(plan, c, {"num_shared_experts"}, 1, "mlp.shared_mlp");
  // 0 makes transformers build one as wide as a dense layer's MLP.
  if (plan.spec.shared.intermediate == 0) c.refuse("num_shared_experts", "1 or more");
  plan.names.shared.push_back(each_expert("mlp.shared_experts"));
  c.expect("moe_router_use_sigmoid", {true});
  c.expect("moe_router_enable_expert_bias", {true});
  c.expect("route_norm", {true});
  c.ignore({"enable_moe_fp32_combine"});
  layers_by_type(plan, c, from(c.integer_or({"first_k_dense_replace"}, 1, 0, max_layers)));
  plan.names.router = {{"mlp.router.gate.weight"}, {"mlp.gate.weight"}};
  plan.names.selection_bias = {{"mlp.expert_bias"}, {"mlp.e_score_correction_bias"}};
  return plan;
}

Plan minimax_m2(Config& c) {
  Plan plan = start(
      c, {.experts = {"num_local_experts", "num_experts"}, .intermediate = {"intermediate_size"}});
  route_sigmoid_bias(plan, true, 0, 1);
  c.expect("scoring_func", {"sigmoid"});
  c.expect("use_routing_bias", {true});
  c.expect("shared_intermediate_size", {0});
  c.ignore(
      {"shared_moe_mode", "mlp_intermediate_size", "layernorm_mlp_alpha", "layernorm_mlp_beta"});
  TensorNames& names = plan.names;
  names = {};
  for (const char* module : {"block_sparse_moe", "mlp"}) {
    const std::string m = module;
    names.router.push_back({m + ".gate.weight"});
    names.selection_bias.push_back({m + ".e_score_correction_bias"});
    names.experts.push_back(each_expert(m + ".experts.{}", "w1", "w3", "w2"));
    names.experts.push_back(merged_experts(m + ".experts"));
  }
  return plan;
}

Plan minimax_m3(Config& c) {
  // hidden_act says swigluoai: what that is, swiglu_alpha and swiglu_limit say.
  c.expect("hidden_act", {"silu", "swigluoai"});
  Plan plan = start(c, {.experts = {"num_local_experts", "num_experts"},
                        .intermediate = {"intermediate_size"},
                        .act_field = ""});
  route_sigmoid_bias(plan, true, 0, scale_of(c, "routed_scaling_factor", 2));
  plan.spec.experts.activation = {
      .alpha = static_cast<float>(c.number_or({"swiglu_alpha"}, 1.702, 1e-6, 1e30)),
      .limit = static_cast<float>(c.number_or({"swiglu_limit"}, 7, 1e-6, 1e30)),
      .up_offset = 1};
  c.expect("swiglu_beta", {1, 1.0});
  c.expect("scoring_func", {"sigmoid"});
  c.expect("use_routing_bias", {true});
  c.expect("n_shared_experts", {1});
  c.expect("num_shared_experts", {1});
  c.ignore({"dense_intermediate_size", "shared_moe_mode"});
  const std::int64_t shared = c.integer_or({"shared_intermediate_size"}, 3072, 1, max_width);
  plan.spec.shared = {.intermediate = shared, .activation = plan.spec.experts.activation};
  const auto sparse = c.integers({"moe_layer_freq"}, 0, 1);
  if (sparse && sparse->size() < plan.layers.size()) {
    c.refuse("moe_layer_freq", "a list with 0 or 1 for each layer");
  }
  layers_by_type(plan, c,
                 [&](int i) { return !sparse || (*sparse)[static_cast<std::size_t>(i)] == 1; });
  TensorNames& names = plan.names;
  names = {};
  for (const char* module : {"block_sparse_moe", "mlp"}) {
    const std::string m = module;
    names.router.push_back({m + ".gate.weight"});
    names.experts.push_back(each_expert(m + ".experts.{}", "w1", "w3", "w2"));
    names.experts.push_back(merged_experts(m + ".experts"));
    names.shared.push_back(each_expert(m + ".shared_experts"));
    names.shared.push_back(
        merged_experts(m + ".shared_experts", "gate_up_proj.weight", "down_proj.weight"));
  }
  names.selection_bias = {{"block_sparse_moe.e_score_correction_bias"},
                          {"mlp.gate.e_score_correction_bias"}};
  return plan;
}

Plan lfm2_moe(Config& c) {
  Plan plan = start(c, {.act_field = ""});  // SiLU whatever hidden_act says
  c.ignore({"hidden_act"});
  route_sigmoid_bias(plan, c.flag_or({"norm_topk_prob"}, true), 1e-6,
                     scale_of(c, "routed_scaling_factor", 1));
  plan.spec.route.selection_bias = c.flag_or({"use_expert_bias"}, true);
  layers_by(plan, from(c.integer_or({"num_dense_layers"}, 2, 0, max_layers)), "dense MLP");
  TensorNames& names = plan.names;
  names = standard_names("feed_forward");
  names.experts[0] = each_expert("feed_forward.experts.{}", "w1", "w3", "w2");
  names.selection_bias = {{"feed_forward.expert_bias"}};
  return plan;
}

Plan afmoe(Config& c) {
  Plan plan = start(c, {});
  route_sigmoid_bias(plan, true, 1e-20, scale_of(c, "route_scale", 1));
  add_shared_count(plan, c, {"num_shared_experts"}, 2, "mlp.shared_experts");
  c.expect("score_func", {"sigmoid"});
  c.expect("route_norm", {true});
  for (const char* name : {"n_group", "topk_group", "num_expert_groups", "num_limited_groups"}) {
    c.expect(name, {1});
  }
  layers_by(plan, from(c.integer_or({"num_dense_layers"}, 1, 0, max_layers)), "dense MLP");
  plan.names.router = {{"mlp.router.gate.weight"}};
  plan.names.selection_bias = {{"mlp.expert_bias"}};
  return plan;
}

Plan laguna(Config& c) {
  Plan plan = start(c, {});
  route_sigmoid_bias(plan, true, 0, scale_of(c, "moe_routed_scaling_factor", 1));
  plan.spec.route.soft_cap =
      static_cast<float>(c.number_or({"moe_router_logit_softcapping"}, 0, 0, 1e30));
  c.expect_false({"moe_apply_router_weight_on_input"});
  c.expect("norm_topk_prob", {true});
  c.expect("moe_router_use_sigmoid", {true});
  add_shared(plan, c.integer({"shared_expert_intermediate_size"}, 1, max_width),
             "mlp.shared_expert");
  plan.names.shared.push_back(each_expert("mlp.shared_experts"));
  // Published configs say the layers twice: by type, and in Qwen's words, which must agree.
  layers_by_type(plan, c, from(1));
  const std::int64_t step = c.integer_or({"decoder_sparse_step"}, 1, 1, max_layers);
  if (const auto dense = c.integers({"mlp_only_layers"}, 0, max_layers)) {
    for (std::size_t i = 0; i < plan.layers.size(); ++i) {
      const auto layer = static_cast<std::int64_t>(i);
      const bool moe =
          (layer + 1) % step == 0 && std::find(dense->begin(), dense->end(), layer) == dense->end();
      if (moe != plan.layers[i].moe) c.refuse("mlp_only_layers", "the layers that are dense");
    }
  } else if (step != 1) {
    c.refuse("decoder_sparse_step", "1 without mlp_only_layers");
  }
  plan.names.selection_bias = {{"mlp.experts.e_score_correction_bias"},
                               {"mlp.gate.e_score_correction_bias"}};
  return plan;
}

namespace {

// "3,4,5", or [3, 4, 5]: the layers with experts. None where nothing says them.
std::optional<std::set<std::int64_t>> listed_layers(Config& c, const char* name) {
  if (!c.has(name)) return std::nullopt;
  std::set<std::int64_t> listed;
  if (c.is_list(name)) {
    for (const std::int64_t layer :
         c.integers({name}, 0, max_layers).value_or(std::vector<std::int64_t>{})) {
      listed.insert(layer);
    }
    return listed;
  }
  std::int64_t number = -1;
  for (const char digit : c.text_or({name}, "") + ",") {
    if (digit >= '0' && digit <= '9' && number < max_layers) {
      number = std::max<std::int64_t>(number, 0) * 10 + (digit - '0');
    } else if (digit == ',') {
      if (number >= 0) listed.insert(number);
      number = -1;
    } else if (digit != ' ') {
      c.refuse(name, "layer numbers, separated by commas");
    }
  }
  return listed;
}

// Step's models; what is left is their router and which layers have experts.
Plan step(Config& c) {
  c.expect("hidden_act", {"silu"});
  // num_local_experts is a default of the class that means nothing here.
  c.ignore({"num_local_experts", "num_attention_groups", "need_fp32_gate"});
  Plan plan = start(c, {.experts = {"moe_num_experts", "n_routed_experts", "num_experts"},
                        .top_k = {"moe_top_k", "num_experts_per_tok"}});
  c.expect("moe_every_n_layer", {1});
  c.expect("moe_layer_offset", {0});
  TensorNames& names = plan.names;
  names.router = {{"moe.gate.weight"}, {"mlp.gate.weight"}};
  names.experts = {{.form = ExpertNames::Form::apart,
                    .gate = "moe.gate_proj.weight",
                    .up = "moe.up_proj.weight",
                    .down = "moe.down_proj.weight"},
                   merged_experts("mlp.experts")};
  return plan;
}

void step_shared(Plan& plan, std::int64_t width) {
  add_shared(plan, width, "share_expert");
  plan.names.shared.push_back(each_expert("mlp.shared_experts"));
}

// Sigmoid and bias; limits a layer.
void step_sigmoid(Plan& plan, Config& c) {
  route_sigmoid_bias(plan, true, 0, scale_of(c, "moe_router_scaling_factor", 1));
  c.expect("moe_router_activation", {"sigmoid"});
  c.expect("norm_expert_weight", {true});
  limits_by_layer(plan, c, "swiglu_limits", "swiglu_limits_shared");
  plan.names.selection_bias = {{"moe.router_bias"}, {"mlp.gate.e_score_correction_bias"}};
}

}  // namespace

Plan step3(Config& c) {
  Plan plan = step(c);
  route_softmax(plan, c.flag_or({"norm_expert_weight"}, false));
  step_shared(plan, c.integer({"share_expert_dim"}, 1, max_width));
  const auto listed = listed_layers(c, "moe_layers_enum");
  // Its two classes disagree about what is absent.
  if (!listed) c.refuse("moe_layers_enum", "a list of layers");
  layers_by(
      plan, [&](int i) { return listed->contains(i); }, "dense MLP");
  return plan;
}

Plan step3p5(Config& c) {
  Plan plan = step(c);
  c.expect("use_moe_router_bias", {true});
  c.expect("use_moe", {true});
  step_shared(plan, c.integer({"share_expert_dim", "share_expert_dims"}, 1, max_width));
  const auto listed = listed_layers(c, "moe_layers_enum");
  layers_by_type(plan, c, [&](int i) { return listed ? listed->contains(i) : i >= 3; });
  step_sigmoid(plan, c);
  return plan;
}

Plan step5(Config& c) {
  Plan plan = step(c);
  const LayerSpec& spec = plan.spec;
  c.expect("use_moe_router_bias", {true});
  c.ignore({"use_moe"});  // false by default, and read nowhere
  step_shared(plan, c.integer_if({"share_expert_dim"}, 1, max_width)
                        .value_or(spec.experts.intermediate * spec.route.top_k));
  const auto listed = listed_layers(c, "moe_layers_enum"),
             also = listed_layers(c, "moe_layer_list");
  if (listed && also && *listed != *also) c.refuse("moe_layer_list", "what moe_layers_enum lists");
  const auto& chosen = listed ? listed : also;
  layers_by(
      plan, [&](int i) { return chosen ? chosen->contains(i) : i >= 1; }, "dense MLP");
  step_sigmoid(plan, c);
  return plan;
}

namespace {

// One mixer a layer: M (state space), * (attention), - (MLP), E (experts). False for another word.
bool add_mixer(std::vector<LayerKind>& kinds, const std::string& word) {
  if (word == "E" || word == "moe") {
    kinds.push_back({true, {}});
  } else if (word == "M" || word == "mamba" || word == "linear_attention") {
    kinds.push_back({false, "state-space layer"});
  } else if (word == "*" || word == "attention" || word == "full_attention") {
    kinds.push_back({false, "attention"});
  } else if (word == "-" || word == "mlp") {
    kinds.push_back({false, "dense MLP"});
  } else {
    return false;
  }
  return true;
}

// What all members have once E, k and I are known.
void nemotron_block(Plan& plan, Config& c) {
  LayerSpec& spec = plan.spec;
  if (!c.has("mlp_hidden_act")) spec.experts.activation = {.kind = Activation::relu2};
  spec.experts.activation.gated = false;
  route_sigmoid_bias(plan, c.flag_or({"norm_topk_prob"}, true), 1e-20,
                     scale_of(c, "routed_scaling_factor", 1));
  const std::int64_t groups = c.integer_or({"n_group"}, 1, 1, 64);
  const std::int64_t keep = c.integer_or({"topk_group"}, 1, 1, groups);
  if (spec.route.experts % groups != 0) c.refuse("n_group", "a divisor of n_routed_experts");
  if (groups > 1) {
    spec.route.groups = {.count = static_cast<int>(groups),
                         .keep = static_cast<int>(keep),
                         .rank_by = GroupRank::sum_of_top_2};
  }
  c.expect("n_shared_experts", {1});
  add_shared(plan, c.integer({"moe_shared_expert_intermediate_size"}, 1, max_width), "");
  spec.latent = c.integer_or({"moe_latent_size"}, 0, 0, max_width);
  if (spec.latent > 0) spec.experts.hidden = spec.latent;
  c.ignore({"num_hidden_layers", "n_groups", "moe_shared_expert_overlap", "mamba_num_groups"});

  TensorNames& names = plan.names;
  names = {};
  names.module = "mixer";
  names.router = {{"mixer.gate.weight"}};
  names.selection_bias = {{"mixer.gate.e_score_correction_bias"}};
  names.experts = {
      {.up = "mixer.experts.{}.up_proj.weight", .down = "mixer.experts.{}.down_proj.weight"},
      {.form = ExpertNames::Form::apart,
       .up = "mixer.experts.up_proj",
       .down = "mixer.experts.down_proj"}};
  names.shared = {{.up = "mixer.shared_experts.up_proj.weight",
                   .down = "mixer.shared_experts.down_proj.weight"}};
  if (spec.latent > 0) {
    names.latent_down = {{"mixer.fc1_latent_proj.weight"}};
    names.latent_up = {{"mixer.fc2_latent_proj.weight"}};
  }
}

}  // namespace

Plan nemotron_h(Config& c) {
  std::vector<LayerKind> kinds;
  if (const auto types = c.texts({"layers_block_type", "layer_types"})) {
    for (const std::string& type : *types) {
      if (!add_mixer(kinds, type))
        c.refuse("layers_block_type", "a list of mamba, attention, mlp and moe");
    }
    c.ignore({"hybrid_override_pattern"});
  } else {
    for (const char letter : c.text_or({"hybrid_override_pattern"}, "")) {
      if (!add_mixer(kinds, std::string(1, letter))) {
        c.refuse("hybrid_override_pattern", "a string of M, *, - and E");
      }
    }
  }
  if (kinds.empty()) c.refuse("layers_block_type", "a list with a word for each layer");
  c.ignore({"num_hidden_layers", "n_groups", "moe_shared_expert_overlap", "mamba_num_groups"});
  const bool any = std::any_of(kinds.begin(), kinds.end(), [](const auto& k) { return k.moe; });
  if (!any) {  // Nemotron-H before experts
    Plan plan;
    plan.spec.hidden = c.integer({"hidden_size"}, 1, max_width);
    plan.layers = kinds;
    plan.names = standard_names("mixer");
    c.ignore({"n_routed_experts", "n_shared_experts", "num_experts_per_tok",
              "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
              "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "mlp_hidden_act",
              "mlp_bias"});
    return plan;
  }
  Plan plan = start(c, {.experts = {"n_routed_experts", "num_local_experts"},
                        .layers = {},
                        .act_field = "mlp_hidden_act"});
  plan.layers = kinds;
  nemotron_block(plan, c);
  return plan;
}

// Pruned by search: `block_configs` has an object a layer, whose fields stand for the model's.
Plan nemotron_h_puzzle(Config& c) {
  std::vector<Config> blocks = c.objects("block_configs");
  if (blocks.empty()) c.refuse("block_configs", "a list with an object for each layer");
  struct Block {
    std::int64_t experts = 0, top_k = 0, intermediate = 0;
  };
  const std::int64_t all = c.integer_or({"n_routed_experts"}, 0, 1, max_experts);
  std::vector<LayerKind> kinds;
  std::vector<Block> found(blocks.size());
  const Block* first = nullptr;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Config& block = blocks[i];
    if (!add_mixer(kinds, block.text_or({"block_type"}, ""))) {
      block.refuse("block_type", "mamba, attention, mlp or moe");
    }
    if (!kinds.back().moe) continue;
    found[i].experts = all > 0
                           ? block.integer_if({"n_routed_experts"}, 1, max_experts).value_or(all)
                           : block.integer({"n_routed_experts"}, 1, max_experts);
    found[i].top_k = block.integer({"num_experts_per_tok"}, 1, max_choices);
    found[i].intermediate = block.integer({"moe_intermediate_size"}, 1, max_width);
    if (found[i].top_k > found[i].experts) {
      fail(Status::bad_file, "{}: num_experts_per_tok is {}: must be at most {}, its experts",
           block.where(), found[i].top_k, found[i].experts);
    }
    block.finish("nemotron_h_puzzle");
    if (first == nullptr) first = &found[i];
  }
  if (first == nullptr) c.refuse("block_configs", "a list with a moe block");
  Plan plan =
      start(c, {.top_k = {"num_experts_per_tok"}, .layers = {}, .act_field = "mlp_hidden_act"},
            first->experts, first->top_k, first->intermediate);
  plan.layers = kinds;
  nemotron_block(plan, c);
  c.ignore({"mtp_block_configs", "layers_block_type", "mtp_layers_block_type"});
  plan.per_layer = [found](int layer, LayerSpec& spec) {
    const Block& here = found[static_cast<std::size_t>(layer)];
    spec.route.experts = spec.experts.experts = static_cast<int>(here.experts);
    spec.route.top_k = static_cast<int>(here.top_k);
    spec.experts.intermediate = here.intermediate;
  };
  return plan;
}

// Yandex' Alice: Qwen3-Next's block with scores and a bias as DeepSeek-V3 has them.
Plan alice_ai(Config& c) {
  Plan plan = start(c, {});
  route_sigmoid_bias(plan, c.flag_or({"norm_topk_prob"}, true), 0, 1);
  c.expect("router_score_function", {"sigmoid"});
  c.expect("router_bias_correction", {true});
  c.ignore({"decoder_sparse_step", "mlp_only_layers"});  // every layer is sparse
  add_shared(plan, c.integer({"shared_expert_intermediate_size"}, 1, max_width),
             "mlp.shared_expert");
  plan.spec.shared.sigmoid_gate = true;
  plan.names.shared_gate = {{"mlp.shared_expert_gate.weight"}};
  plan.names.selection_bias = {{"mlp.gate.e_score_correction_bias"}};
  return plan;
}

// K2 Horizon, xLLM. The gate's bias is not added to the logits, but selects. Dense members of the
// family have no experts.
Plan k2_horizon(Config& c) {
  // The mixture of value heads in attention.
  c.ignore({"mova_num_experts", "mova_num_experts_per_tok"});
  if (c.integer({"num_experts"}, 0, max_experts) == 0) {
    return without_experts(c, {"num_experts_per_tok", "moe_intermediate_size", "num_shared_experts",
                               "mlp_only_layers", "decoder_sparse_step", "moe_gate_bias",
                               "router_score_func", "router_scaling_factor", "norm_topk_prob"});
  }
  Plan plan = start(c, {.experts = {"num_experts"}});
  for (const char* name : {"norm_topk_prob", "moe_gate_bias"}) {
    if (!c.has(name)) c.refuse(name, "true or false");
  }
  route_sigmoid_bias(plan, c.flag_or({"norm_topk_prob"}, false), 0,
                     scale_of(c, "router_scaling_factor", 1));
  plan.spec.route.selection_bias = c.flag_or({"moe_gate_bias"}, false);
  const std::string score = c.text_or({"router_score_func"}, "");
  if (score == "softmax") {
    plan.spec.route.score = Score::softmax;
  } else if (score != "sigmoid") {
    c.refuse("router_score_func", "sigmoid or softmax");
  }
  add_shared_count(plan, c, {"num_shared_experts"}, 0, "mlp.shared_experts");
  layers_by_step(plan, c);
  plan.names.selection_bias = {{"mlp.gate.bias"}};
  return plan;
}

// No bias and no epsilon, and a shared expert without a gate.
Plan flint(Config& c) {
  Plan plan = start(c, {});
  plan.spec.route.score = Score::sigmoid;
  plan.spec.route.renormalize = c.flag_or({"norm_topk_prob"}, true);
  plan.spec.route.renormalize_epsilon = 0;
  c.expect("router_score_function", {"sigmoid"});
  add_shared(plan, c.integer_or({"shared_expert_intermediate_size"}, 1024, 1, max_width),
             "mlp.shared_expert");
  layers_by_step(plan, c, {0, 1});
  return plan;
}

// The bias is added to the logits, and the weights are the sigmoids of those chosen.
Plan kolibri1(Config& c) {
  Plan plan = start(c, {});
  RouteSpec& route = plan.spec.route;
  route.score = Score::sigmoid;
  route.score_stage = ScoreStage::after_top_k;
  route.selection_bias = true;
  route.renormalize = c.flag_or({"norm_topk_prob"}, false);
  route.renormalize_epsilon = 0;
  add_shared(plan, c.integer_or({"shared_expert_intermediate_size"}, 512, 1, max_width),
             "mlp.shared_experts");
  plan.names.selection_bias = {{"moe.router.expert_bias"}, {"mlp.gate.e_score_correction_bias"}};
  return plan;
}

// Experts in a latent width, each with a norm behind it. Norms weigh by 1 + what is stored, and the
// router's logits are multiplied by a number, which its weights are read with.
Plan muse_spark(Config& c) {
  Plan plan = start(c, {.experts = {"num_local_experts", "num_experts"}});
  c.expect("num_shared_experts", {0});
  route_sigmoid_bias(plan, true, 1e-15, scale_of(c, "routed_scaling_factor", 1));
  layers_by_type(plan, c, [](int) { return true; });
  LayerSpec& spec = plan.spec;
  spec.latent = spec.experts.hidden = c.integer_or({"moe_hidden_size"}, 4096, 1, max_width);
  const auto norm = [&](const char* epsilon, double absent) {
    return NormSpec{.enabled = true,
                    .epsilon = static_cast<float>(c.number_or({epsilon}, absent, 0, 1)),
                    .weight = true};
  };
  spec.latent_input_norm = norm("rms_norm_eps", 1e-5);
  spec.expert_norm = norm("post_norm_eps", 1e-8);
  spec.expert_norm.weight_first = true;
  TensorNames& names = plan.names;
  const double multiplier = c.number_or({"output_multiplier"}, 0.1767766952966369, -1e30, 1e30);
  names.router = {{.name = "mlp.gate.weight", .times = static_cast<float>(multiplier)}};
  names.selection_bias = {{"mlp.gate.e_score_correction_bias"}};
  names.experts = {merged_experts("mlp.experts"), each_expert("mlp.experts.{}")};
  names.latent_down = {{"mlp.pre_expert_proj.weight"}};
  names.latent_up = {{"mlp.post_expert_proj.weight"}};
  names.latent_input_norm = {{.name = "mlp.pre_expert_norm.weight", .plus = 1}};
  names.expert_norm = {{.name = "mlp.experts.post_expert_norm.weight", .plus = 1}};
  plan.beside = "the gate of the residual";
  return plan;
}

// Rows 2j and 2j + 1 of w13 are gate j and up j.
Plan inkling2(Config& c) {
  Plan plan = start(c, {.experts = {"n_routed_experts", "num_local_experts"},
                        .intermediate = {"moe_intermediate_size", "intermediate_size"}});
  c.expect("hidden_act", {"silu"});  // its bends are said beside it
  c.expect("scoring_func", {"sigmoid"});
  c.expect("n_shared_experts", {0});
  route_sigmoid_bias(plan, true, 1e-20,
                     c.number_or({"route_scale", "routed_scaling_factor"}, 8, -1e30, 1e30));
  const auto bound = [&](std::string_view name, double absent) {
    return static_cast<float>(c.number_or({name}, absent, 1e-6, 1e6));
  };
  plan.spec.experts.activation = {.kind = Activation::situ,
                                  .beta = bound("mlp_gate_softcap", 4),
                                  .linear_beta = bound("mlp_up_softcap", 25)};
  TensorNames& names = plan.names;
  names.selection_bias = {{"mlp.gate.bias"}, {"mlp.gate.e_score_correction_bias"}};
  names.experts = {merged_experts("mlp.experts", "w13_weight", "w2_weight"),
                   merged_experts("mlp.experts")};
  names.experts[0].interleaved = true;
  plan.beside = "the short convolution behind the block";
  return plan;
}

Plan inkling(Config& c) {
  // As published the width of dense layers has a name of its own, and intermediate_size is that of
  // the experts; transformers writes moe_intermediate_size, and the other is of dense layers.
  const bool published = c.has("dense_intermediate_size") && !c.has("moe_intermediate_size");
  const char* const width = published ? "intermediate_size" : "moe_intermediate_size";
  Plan plan =
      start(c, {.experts = {"n_routed_experts", "num_local_experts"}, .intermediate = {width}});
  c.expect("gate_activation", {"sigmoid"});
  for (const char* name :
       {"norm_after_topk", "use_gate_bias", "use_global_scale", "inference_moe_w13_interleaved"}) {
    c.expect(name, {true});
  }
  LayerSpec& spec = plan.spec;
  route_sigmoid_bias(plan, true, 0, scale_of(c, "route_scale", 8));
  const std::int64_t shared = c.integer_or({"n_shared_experts"}, 2, 1, 64);
  spec.route.shared = {.count = static_cast<int>(shared), .weight = SharedWeight::joint};
  spec.experts.experts += static_cast<int>(shared);
  spec.route.per_expert_scale = true;  // one number for all: gate.global_scale
  c.expect("shared_expert_sink", {true});
  c.ignore({"rms_norm_eps_moe_gate", "dense_intermediate_size", "dense_mlp_idx"});
  layers_by_type(plan, c, from(c.integer_or({"dense_mlp_idx"}, 0, 0, max_layers)));
  TensorNames& names = plan.names;
  names.selection_bias = {{"mlp.gate.bias"}, {"mlp.gate.e_score_correction_bias"}};
  names.per_expert_scale = {{"mlp.gate.global_scale"}};
  names.experts = {merged_experts("mlp.experts", "w13_weight", "w2_weight"),
                   merged_experts("mlp.experts")};
  names.experts[0].interleaved = true;
  names.slots = {merged_experts("mlp.shared_experts", "shared_w13_weight", "shared_w2_weight"),
                 {.form = ExpertNames::Form::apart,
                  .gate = "mlp.shared_experts.gate_proj",
                  .up = "mlp.shared_experts.up_proj",
                  .down = "mlp.shared_experts.down_proj"}};
  names.slots[0].interleaved = true;
  plan.beside = "the short convolution behind the block";
  return plan;
}

}  // namespace shunt::families
