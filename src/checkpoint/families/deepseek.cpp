// DeepSeek's families and those that route as they do.
#include "checkpoint/families.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt::families {

namespace {

struct Defaults {
  double scale = 1;
  bool renormalize = true;
  std::int64_t groups = 1, keep = 1;
  std::int64_t shared = 1;
};

struct FieldNames {
  Basics basics = {.experts = {"n_routed_experts", "num_local_experts", "num_experts"}};
  Config::Names shared = {"n_shared_experts", "num_shared_experts"};
  Config::Names groups = {"n_group"};
  Config::Names renormalize = {"norm_topk_prob"};
};

// n_group groups of which topk_group stay; ranked by `rank`. An n_group of null: none.
void add_groups(Plan& plan, Config& c, const Config::Names& count_names, const Defaults& absent,
                GroupRank rank) {
  RouteSpec& route = plan.spec.route;
  const std::string_view name = c.name_of(count_names);
  if (c.is_null(name)) {
    c.expect("topk_group", {0, 1});
    return c.ignore(count_names);
  }
  const std::int64_t count = c.integer_or(count_names, absent.groups, 1, 64);
  const std::int64_t keep = c.integer_or({"topk_group"}, absent.keep, 1, 64);
  const std::int64_t each = route.experts / count;
  if (route.experts % count != 0) {
    fail(Status::bad_file, "{}: {} is {}: must divide the number of experts, {}", c.where(), name,
         count, route.experts);
  }
  if (count > 1 && rank == GroupRank::sum_of_top_2 && each < 2) {
    fail(Status::bad_file, "{}: {} is {}: must leave two experts or more in a group, of {}",
         c.where(), name, count, route.experts);
  }
  if (keep <= count && route.top_k > keep * each) {
    fail(Status::bad_file,
         "{}: topk_group is {}: {} groups of {} experts hold fewer than the {} to choose",
         c.where(), keep, keep, each, route.top_k);
  }
  if (keep > count) {
    fail(Status::bad_file, "{}: topk_group is {}: must be at most {}, the number of groups",
         c.where(), keep, count);
  }
  if (count > 1) {
    route.groups = {
        .count = static_cast<int>(count), .keep = static_cast<int>(keep), .rank_by = rank};
  }
}

// Sigmoid, e_score_correction_bias, groups by the sum of their two best, 1e-20 under the weights.
Plan v3(Config& c, const Defaults& absent, const FieldNames& fields = {}) {
  Plan plan = start(c, fields.basics);
  route_sigmoid_bias(plan, c.flag_or(fields.renormalize, absent.renormalize), 1e-20,
                     c.number_or({"routed_scaling_factor"}, absent.scale, -1e30, 1e30));
  add_groups(plan, c, fields.groups, absent, GroupRank::sum_of_top_2);
  plan.names.selection_bias = {{"mlp.gate.e_score_correction_bias"}};
  add_shared_count(plan, c, fields.shared, absent.shared, "mlp.shared_experts");
  c.expect("scoring_func", {"sigmoid"});
  c.expect("topk_method", {"noaux_tc"});
  return plan;
}

void refuse_shared(const Plan& plan, const Config& c) {
  if (plan.spec.shared.intermediate == 0) return;
  c.refuse(c.name_of(FieldNames().shared), "null or 0");
}

// Of routed and of shared experts, where it is above 0.
void clamp_where_said(Plan& plan, Config& c) {
  const double limit = c.number_or({"swiglu_limit"}, 0, -1e30, 1e30);
  if (limit <= 0) return;
  plan.spec.experts.activation.limit = static_cast<float>(limit);
  plan.spec.shared.activation = plan.spec.experts.activation;
}

void clamp(ActivationSpec& activation, Config& c) {
  activation.limit = static_cast<float>(c.number_or({"swiglu_limit"}, 10, 1e-6, 1e30));
}

// DeepSeek-V2: softmax, groups by their best, never renormalised.
Plan v2(Config& c) {
  Plan plan = start(c, {.experts = {"n_routed_experts", "num_experts"}});
  route_softmax(plan, false);
  plan.spec.route.scale =
      static_cast<float>(c.number_or({"routed_scaling_factor"}, 1, -1e30, 1e30));
  c.expect("scoring_func", {"softmax"});
  c.expect("norm_topk_prob", {false});
  const std::string method = c.text_or({"topk_method"}, "greedy");
  if (method == "group_limited_greedy") {
    if (!c.has("n_group") || !c.has("topk_group")) {
      c.refuse(c.has("n_group") ? "topk_group" : "n_group",
               "an integer, with topk_method group_limited_greedy");
    }
    add_groups(plan, c, {"n_group"}, {}, GroupRank::max);
  } else if (method == "greedy") {
    c.ignore({"n_group", "topk_group"});
  } else {
    c.refuse("topk_method", "greedy or group_limited_greedy");
  }
  add_shared_count(plan, c, {"n_shared_experts"}, 2, "mlp.shared_experts");
  return plan;
}

}  // namespace

Plan deepseek_v2(Config& c) {
  // DeepSeek-VL2's largest has the later rule under the earlier name.
  Plan plan = c.text_or({"topk_method"}, "") == "noaux_tc" ? v3(c, {}) : v2(c);
  layers_from(plan, c, 0);
  return plan;
}

Plan deepseek_ocr2(Config& c) {
  Plan plan = v2(c);
  layers_from(plan, c, 1);
  return plan;
}

Plan mistral4(Config& c) {
  Plan plan = start(c, {.experts = {"n_routed_experts", "num_local_experts", "num_experts"}});
  route_softmax(plan, c.flag_or({"norm_topk_prob"}, true));
  plan.spec.route.scale =
      static_cast<float>(c.number_or({"routed_scaling_factor"}, 1, -1e30, 1e30));
  add_groups(plan, c, {"n_group"}, {}, GroupRank::sum_of_top_2);
  add_shared_count(plan, c, {"n_shared_experts"}, 1, "mlp.shared_experts");
  layers_from(plan, c, 0);
  return plan;
}

Plan mistral_large4(Config& c) {
  c.expect("norm_topk_prob", {true});
  Plan plan = mistral4(c);
  layers_from(plan, c, 1);
  // Published: straight in the layer; transformers: in its mlp.
  TensorNames& names = plan.names;
  names.router.insert(names.router.begin(), {"gate.weight"});
  names.experts.insert(names.experts.begin(), each_expert("experts.{}", "w1", "w3", "w2"));
  if (plan.spec.shared.intermediate > 0) {
    names.shared.insert(names.shared.begin(), each_expert("shared_experts", "w1", "w3", "w2"));
  }
  return plan;
}

Plan deepseek_v3(Config& c) {
  Plan plan = v3(c, {.scale = 2.5, .groups = 8, .keep = 4});
  layers_from(plan, c, 3);
  return plan;
}

Plan deepseek_v32(Config& c) {
  Plan plan = v3(c, {.scale = 2.5, .groups = 8, .keep = 4});
  layers_from(plan, c, 3);
  return plan;
}

Plan gigachat3_5(Config& c) {
  Plan plan = v3(c, {.scale = 2.5, .shared = 2});
  clamp_where_said(plan, c);
  c.expect_false({"use_shared_expert_sigmoid"});
  c.ignore({"nextn_is_sparse"});
  layers_from(plan, c, 1);
  return plan;
}

// openPangu: the bias is asked for, and lies beside the gate.
Plan pangu(Config& c) {
  Plan plan = v3(c, {.shared = 0});
  plan.spec.route.selection_bias = c.flag_or({"router_enable_expert_bias"}, false);
  plan.names.selection_bias = {{"mlp.e_score_correction_bias"},
                               {"mlp.gate.e_score_correction_bias"}};
  if (!c.has("first_k_dense_replace")) c.refuse("first_k_dense_replace", "an integer");
  layers_from(plan, c, 0);
  if (c.flag_or({"sandwich_norm"}, false)) plan.beside = "the norms before and behind the block";
  return plan;
}

Plan glm4_moe(Config& c) {
  Plan plan = v3(c, {});
  layers_from(plan, c, 1);
  return plan;
}

// Published by other names of some fields and of the bias.
Plan sarvam(Config& c) {
  Plan plan = v3(c, {.scale = 2.5});
  plan.names.selection_bias = {{"mlp.gate.expert_bias"}, {"mlp.gate.e_score_correction_bias"}};
  c.expect("moe_router_enable_expert_bias", {true});
  c.expect("score_function", {"sigmoid"});
  // It is multiplied by their number, as moe_intermediate_size is.
  SharedExpertSpec& shared = plan.spec.shared;
  const std::int64_t each = plan.spec.experts.intermediate, count = shared.intermediate / each;
  shared.intermediate =
      count * c.integer_if({"moe_shared_expert_intermediate_size"}, 1, max_width).value_or(each);
  layers_from(plan, c, 1);
  return plan;
}

Plan glm4_moe_lite(Config& c) {
  Plan plan = v3(c, {.scale = 1.8});
  layers_from(plan, c, 1);
  return plan;
}

Plan glm_moe_dsa(Config& c) {
  Plan plan = v3(c, {.scale = 2.5});
  layers_from(plan, c, 3);
  return plan;
}

Plan glm5_next(Config& c) {
  c.expect("hidden_act", {"silu"});  // any other is of the shared experts only
  Plan plan = v3(c, {.scale = 2.5});
  clamp(plan.spec.experts.activation, c);
  plan.spec.shared.activation = plan.spec.experts.activation;
  layers_from(plan, c, 3);
  return plan;
}

Plan solar_open(Config& c) {
  Plan plan = v3(c, {});
  c.expect("first_k_dense_replace", {0});
  c.expect("moe_layer_freq", {1});
  return plan;
}

Plan axk1(Config& c) {
  Plan plan = v3(c, {.scale = 2.5, .groups = 8, .keep = 4});
  layers_from(plan, c, 1);
  // Published at the decoder layer; transformers 5 has it in the block.
  plan.spec.output_norm = {.enabled = true,
                           .epsilon = static_cast<float>(c.number_or({"rms_norm_eps"}, 1e-6, 0, 1)),
                           .weight = true,
                           .multiplier = 1};
  plan.names.output_norm = {{"post_mlp_layernorm.weight"}, {"mlp.post_mlp_layernorm.weight"}};
  return plan;
}

Plan axk2(Config& c) {
  Plan plan = v3(c, {.scale = 2.5});
  // Its code masks with 0 instead of -inf, which a negative bias makes another rule.
  if (plan.spec.route.groups.count > 1) {
    fail(Status::unsupported,
         "{}: n_group is {}: groups of A.X K2 are not understood, only null or 1", c.where(),
         plan.spec.route.groups.count);
  }
  layers_from(plan, c, 1);
  return plan;
}

Plan dots1(Config& c) {
  c.expect("scoring_func", {"noaux_tc", "sigmoid"});
  FieldNames fields;
  Plan plan = start(c, fields.basics);
  route_sigmoid_bias(plan, c.flag_or({"norm_topk_prob"}, false), 1e-20,
                     c.number_or({"routed_scaling_factor"}, 1, -1e30, 1e30));
  add_groups(plan, c, {"n_group"}, {}, GroupRank::sum_of_top_2);
  plan.names.selection_bias = {{"mlp.gate.e_score_correction_bias"}};
  if (!c.has("n_shared_experts")) c.refuse("n_shared_experts", "an integer");
  add_shared_count(plan, c, {"n_shared_experts"}, 0, "mlp.shared_experts");
  c.expect("topk_method", {"noaux_tc"});
  layers_from(plan, c, 0);
  return plan;
}

Plan beam(Config& c) {
  Plan plan = v3(c, {.scale = 2.5, .groups = 8, .keep = 4, .shared = 0});
  refuse_shared(plan, c);
  layers_from(plan, c, 3);
  return plan;
}

namespace {

// mlp_layer_types, or moe_layer_freq as published, a list of 0 and 1; else all but the first
// `dense` layers.
void listed_layers(Plan& plan, Config& c, std::int64_t dense) {
  const auto sparse = c.integers({"moe_layer_freq"}, 0, 1);
  if (sparse && sparse->size() < plan.layers.size()) {
    c.refuse("moe_layer_freq", "a list with 0 or 1 for each layer");
  }
  layers_by_type(plan, c, [&](int i) {
    return i >= dense && (!sparse || (*sparse)[static_cast<std::size_t>(i)] == 1);
  });
}

}  // namespace

Plan dots3_note(Config& c) {
  Plan plan = v3(c, {});
  SharedExpertSpec& shared = plan.spec.shared;
  const std::int64_t count = shared.intermediate / plan.spec.experts.intermediate;
  shared.intermediate = count * c.integer_or({"shared_experts_intermediate_size",
                                              "moe_shared_expert_intermediate_size"},
                                             1536, 1, max_width);
  const std::int64_t dense = c.integer_or({"first_k_dense_replace"}, 1, 0, max_layers);
  if (c.is_list("moe_layer_freq")) {
    listed_layers(plan, c, dense);
  } else {
    layers_from(plan, c, 1);
  }
  return plan;
}

Plan mimo_v2_flash(Config& c) {
  Plan plan = v3(c, {.shared = 0});
  refuse_shared(plan, c);
  listed_layers(plan, c, c.is_list("moe_layer_freq") ? 0 : 1);
  return plan;
}

namespace {

// inclusionAI's own code: bias by another name, and a width of the shared experts that may be said
// for itself. transformers, which has Ling 3 alone, saves its own names of some fields.
Plan bailing(Config& c, bool sigmoid, bool biased = true) {
  const FieldNames fields{.basics = {.experts = {"num_experts"},
                                     .top_k = {"num_experts_per_tok", "num_experts_per_token"}},
                          .shared = {"num_shared_experts"},
                          .groups = {"n_group", "num_expert_group"},
                          .renormalize = {"norm_topk_prob", "moe_renormalize"}};
  Plan plan;
  if (c.text_or({"score_function"}, sigmoid ? "sigmoid" : "softmax") == "sigmoid") {
    const bool renamed = c.has("num_expert_group");
    for (const char* name :
         {renamed ? "num_expert_group" : "n_group", "topk_group", "routed_scaling_factor"}) {
      if (!c.has(name)) c.refuse(name, "a number, with score_function sigmoid");
    }
    plan = v3(c, {.shared = 0}, fields);
    plan.spec.route.selection_bias = c.flag_or({"moe_router_enable_expert_bias"}, biased);
    plan.names.selection_bias = {{"mlp.gate.expert_bias"}, {"mlp.gate.e_score_correction_bias"}};
    // Of Ling 3's last layers. Its own code reads them nowhere, but the model was trained so, and
    // vLLM and SGLang compute it.
    limits_by_layer(plan, c, "expert_swiglu_limit_list", "share_expert_swiglu_limit_list");
  } else {
    plan = start(c, fields.basics);
    route_softmax(plan, c.flag_or({"norm_topk_prob"}, true));
    plan.spec.route.scale =
        static_cast<float>(c.number_or({"routed_scaling_factor"}, 1, -1e30, 1e30));
    add_shared_count(plan, c, fields.shared, 0, "mlp.shared_experts");
    c.expect_false({"moe_router_enable_expert_bias"});
    c.expect("n_group", {0, 1});
    c.expect("topk_group", {0, 1});
  }
  c.expect("score_function", {"sigmoid", "softmax"});
  // It is multiplied by their number, as moe_intermediate_size is.
  c.expect("moe_shared_expert_intermediate_size", {plan.spec.experts.intermediate});
  c.expect_false({"scale_router_input", "use_nGPT", "up_proj_norm", "multi_gate"});
  c.ignore({"router_dtype", "use_expert_bias"});
  c.expect("moe_router_enable_shared_expert", {true});
  layers_from(plan, c, 0);
  return plan;
}

}  // namespace

Plan bailing_moe(Config& c) { return bailing(c, false); }
Plan bailing_moe_v2(Config& c) { return bailing(c, true); }
// Its classes disagree about what is absent.
Plan bailing_hybrid(Config& c) {
  for (const char* name : {"num_shared_experts", "first_k_dense_replace"}) {
    if (!c.has(name)) c.refuse(name, "an integer");
  }
  return bailing(c, true);
}

// Its `expert_capacity`, experts that a block of tokens shares, is refused as not understood.
Plan llada2_moe(Config& c) {
  for (const char* name : {"score_function", "norm_topk_prob", "first_k_dense_replace"}) {
    if (!c.has(name)) c.refuse(name, "said");
  }
  return bailing(c, true, false);
}

// Ling 2's rule, but the width of the shared experts is that of all of them.
Plan param2moe(Config& c) {
  if (!c.has("num_shared_experts")) c.refuse("num_shared_experts", "an integer");
  Plan plan = v3(c, {.shared = 0}, {.basics = {.experts = {"num_experts"}}});
  SharedExpertSpec& shared = plan.spec.shared;
  if (shared.intermediate > 0) {
    shared.intermediate = c.integer_if({"moe_shared_expert_intermediate_size"}, 1, max_width)
                              .value_or(shared.intermediate);
  }
  plan.names.selection_bias = {{"mlp.gate.expert_bias"}};
  c.expect("score_function", {"sigmoid"});
  c.expect("moe_router_enable_expert_bias", {true});
  layers_from(plan, c, 1);
  return plan;
}

Plan exaone_moe(Config& c) {
  c.ignore({"first_last_k_dense_replace"});  // of a first revision; nobody reads it
  Plan plan = v3(c, {.scale = 2.5}, {.basics = {.experts = {"num_experts"}}});
  layers_from(plan, c, 1);
  if (c.has("is_moe_layer")) {  // says the same once more
    for (std::size_t i = 0; i < plan.layers.size(); ++i) {
      const std::string words =
          fmt::format("one flag a layer; {} in layer {}", plan.layers[i].moe, i);
      if (!c.element_is("is_moe_layer", i, plan.layers[i].moe)) c.refuse("is_moe_layer", words);
    }
  }
  plan.names.selection_bias = {{"mlp.e_score_correction_bias"},
                               {"mlp.gate.e_score_correction_bias"}};
  return plan;
}

Plan kimi_linear(Config& c) {
  Plan plan = v3(c, {.scale = 2.446},
                 {.basics = {.experts = {"num_experts", "num_local_experts", "n_routed_experts"},
                             .top_k = {"num_experts_per_token", "num_experts_per_tok"}},
                  .shared = {"num_shared_experts", "n_shared_experts"},
                  .groups = {"num_expert_group", "n_group"},
                  .renormalize = {"moe_renormalize", "norm_topk_prob"}});
  c.expect("moe_router_activation_func", {"sigmoid"});
  if (plan.spec.route.groups.count > 1) {
    c.expect("use_grouped_topk", {true});
  } else {
    c.ignore({"use_grouped_topk"});
  }
  layers_from(plan, c, 1);
  TensorNames& names = plan.names;
  names = {};
  for (const char* module : {"block_sparse_moe", "mlp"}) {
    const std::string m = module;
    names.router.push_back({m + ".gate.weight"});
    names.selection_bias.push_back({m + ".gate.e_score_correction_bias"});
    names.experts.push_back(each_expert(m + ".experts.{}", "w1", "w3", "w2"));
    names.experts.push_back(merged_experts(m + ".experts"));
    if (plan.spec.shared.intermediate > 0) {
      names.shared.push_back(each_expert(m + ".shared_experts"));
    }
    names.latent_down.push_back({m + ".routed_expert_down_proj.weight"});
    names.latent_up.push_back({m + ".routed_expert_up_proj.weight"});
    names.latent_norm.push_back({m + ".routed_expert_norm.weight"});
  }
  // Kimi K3; the shared expert stays as wide as the model.
  LayerSpec& spec = plan.spec;
  spec.latent = c.integer_or({"routed_expert_hidden_size"}, 0, 1, max_width);
  const bool norm = c.flag_or({"latent_moe_use_norm"}, false);
  if (spec.latent > 0) {
    spec.experts.hidden = spec.latent;
    const auto epsilon = static_cast<float>(c.number_or({"rms_norm_eps"}, 1e-5, 0, 1));
    spec.latent_norm = {.enabled = norm, .epsilon = epsilon, .weight = true};
    if (!norm) spec.latent_norm = {};
  }
  return plan;
}

Plan hy_v4(Config& c) {
  c.expect("hidden_act", {"silu"});  // any other is of the shared experts only
  Plan plan = v3(c, {.scale = 2.827});
  clamp(plan.spec.experts.activation, c);  // the routed experts only
  // What transformers 5.17 saves, its rename of attention gates hitting the MLPs too.
  plan.names.shared.push_back(each_expert("mlp.shared_experts", "linear_gate"));
  layers_from(plan, c, 1);
  return plan;
}

namespace {

// `hash_layers`: how many there are unless it is said.
Plan v4(Config& c, std::int64_t hash_layers) {
  Plan plan = start(c, {.experts = {"n_routed_experts", "num_local_experts"},
                        .intermediate = {"moe_intermediate_size", "intermediate_size"}});
  RouteSpec& route = plan.spec.route;
  route_sigmoid_bias(plan, true, 1e-20, c.number_or({"routed_scaling_factor"}, 1.5, -1e30, 1e30));
  const std::string score = c.text_or({"scoring_func"}, "sqrtsoftplus");
  if (score == "sqrtsoftplus") {
    route.score = Score::sqrt_softplus;
  } else if (score != "sigmoid") {
    c.refuse("scoring_func", "sqrtsoftplus or sigmoid");
  }
  clamp(plan.spec.experts.activation, c);
  c.expect("n_shared_experts", {1});
  c.expect("norm_topk_prob", {true});
  c.expect("topk_method", {"noaux_tc"});
  c.expect("expert_dtype", {"bf16", "bfloat16", "fp4", "fp8"});  // tensors say which
  add_shared(plan, plan.spec.experts.intermediate, "mlp.shared_experts");

  std::vector<bool> hashed(plan.layers.size());
  if (const auto types = c.texts({"mlp_layer_types"})) {
    for (std::size_t i = 0; i < hashed.size(); ++i) {
      if (i >= types->size() || ((*types)[i] != "moe" && (*types)[i] != "hash_moe")) {
        c.refuse("mlp_layer_types", "a list with moe or hash_moe for each layer");
      }
      hashed[i] = (*types)[i] == "hash_moe";
    }
    c.ignore({"num_hash_layers", "n_hash_layers"});
  } else {
    const std::int64_t first =
        c.integer_or({"num_hash_layers", "n_hash_layers"}, hash_layers, 0, max_layers);
    for (std::size_t i = 0; i < hashed.size(); ++i)
      hashed[i] = static_cast<std::int64_t>(i) < first;
  }
  plan.per_layer = [hashed](int layer, LayerSpec& spec) {
    spec.route.hashed = hashed[static_cast<std::size_t>(layer)];
    spec.route.selection_bias = !spec.route.hashed;
  };

  TensorNames& names = plan.names;
  names = {};
  names.shared.clear();
  for (const char* module : {"ffn", "mlp"}) {
    const std::string m = module;
    names.router.push_back({m + ".gate.weight"});
    names.hash_table.push_back({m + ".gate.tid2eid"});
    names.experts.push_back(each_expert(m + ".experts.{}", "w1", "w3", "w2"));
    names.experts.push_back(merged_experts(m + ".experts"));
    names.shared.push_back(each_expert(m + ".shared_experts", "w1", "w3", "w2"));
    names.shared.push_back(each_expert(m + ".shared_experts"));
  }
  names.selection_bias = {{"ffn.gate.bias"}, {"mlp.gate.e_score_correction_bias"}};
  return plan;
}

}  // namespace

Plan deepseek_v4(Config& c) { return v4(c, 3); }

// Image tokens are selected with a bias of their own (gate.bias_vl); text is what is computed.
Plan deepseek_v41(Config& c) {
  Plan plan = v4(c, 0);
  c.expect("gate_temp", {1, 1.0});
  c.ignore({"dspark_n_routed_experts", "dspark_num_experts_per_tok"});  // of the draft's layers
  plan.names.beside = {"ffn.gate.bias_vl"};
  plan.beside = "the selection bias of image tokens";
  return plan;
}

}  // namespace shunt::families
