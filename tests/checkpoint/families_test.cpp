// Families: published configs become their specs, and what is not understood is refused.
#include "checkpoint/family.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/golden.hpp"
#include "checkpoint/model.hpp"
#include "checkpoint/published_configs.hpp"
#include "checkpoint/temporary.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {
namespace {

using test::Published;
using test::published_configs;

class PublishedConfigs : public testing::TestWithParam<Published> {};

TEST_P(PublishedConfigs, BecomeTheirSpecs) {
  const Published& p = GetParam();
  const Model model = read_model("config.json", p.config);
  LayerSpec expected = p.expected;
  if (expected.shared.intermediate == 0) expected.shared = {};
  EXPECT_EQ(to_json(layer_spec_from_config(p.config, p.layer)), to_json(expected));
  EXPECT_EQ(std::count_if(model.plan.layers.begin(), model.plan.layers.end(),
                          [](const LayerKind& kind) { return kind.moe; }),
            p.moe_layers);
  const Support support = supports(model.spec(p.layer), {}, Device{});
  EXPECT_TRUE(support) << support.reason;
}

INSTANTIATE_TEST_SUITE_P(Families, PublishedConfigs, testing::ValuesIn(published_configs()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Families, HashLayersOfDeepSeekV4) {
  for (const Published& p : published_configs()) {
    if (std::string(p.name) != "deepseek_v4_flash_bf16") continue;
    EXPECT_TRUE(layer_spec_from_config(p.config, 2).route.hashed);
    EXPECT_FALSE(layer_spec_from_config(p.config, 2).route.selection_bias);
    EXPECT_FALSE(layer_spec_from_config(p.config, 3).route.hashed);
  }
}

// Fields that change the mathematics in a way that the family's code does not have.
TEST(Families, RefuseWhatTheyDoNotUnderstand) {
  struct Case {
    const char *config_of, *field, *value, *message;
  };
  const Case cases[] = {
      {"deepseek_v3", "scoring_func", "\"softmax\"", "scoring_func is \"softmax\""},
      {"deepseek_v3", "topk_method", "\"greedy\"", "topk_method is \"greedy\""},
      {"deepseek_v3", "moe_layer_freq", "2", "moe_layer_freq is 2"},
      {"deepseek_v3", "n_group", "7", "must divide the number of experts, 256"},
      {"deepseek_v3", "topk_group", "9", "topk_group is 9: must be at most 8"},
      {"deepseek_v3", "topk_group", "null", "topk_group is null: must be an integer"},
      {"deepseek_v3", "first_k_dense_replace", "null", "first_k_dense_replace is null: must be"},
      {"deepseek_v3", "routed_scaling_factor", "\"2.5\"", "routed_scaling_factor is \"2.5\""},
      {"deepseek_v3", "quantization_config", R"({"quant_method":"hqq"})",
       "quant_method is \"hqq\": not read"},
      {"deepseek_v2", "norm_topk_prob", "true", "norm_topk_prob is true"},
      {"deepseek_v2", "topk_method", "\"noaux_tc\"", "scoring_func is \"softmax\""},
      {"deepseek_v2", "topk_method", "\"other\"", "topk_method is \"other\""},
      {"laguna", "mlp_only_layers", "[1]", "mlp_only_layers is [1]"},
      {"laguna", "decoder_sparse_step", "2", "mlp_only_layers is [0]"},
      {"ling_mini_2", "n_group", "null", "n_group is null: must be a number"},
      {"ling_mini_2", "moe_shared_expert_intermediate_size", "1024",
       "moe_shared_expert_intermediate_size is 1024"},
      {"inkling_published", "gate_activation", "\"softmax\"", "gate_activation is \"softmax\""},
      {"inkling_published", "norm_after_topk", "false", "norm_after_topk is false"},
      {"ernie_vl_published", "moe_num_experts", "[64]", "moe_num_experts is [64]"},
      {"gpt_oss_120b", "swiglu_limit", "-1.0", "swiglu_limit is -1.0"},
      {"gpt_oss_120b", "experts_per_token", "8", "must be equal"},
      {"minimax_m2", "scoring_func", "\"softmax\"", "scoring_func is \"softmax\""},
      {"minimax_m2", "use_routing_bias", "false", "use_routing_bias is false"},
      {"minimax_m2", "shared_intermediate_size", "1536", "shared_intermediate_size is 1536"},
      {"hunyuan_a13b", "moe_intermediate_size", "[3072, 1024]", "must be intermediate_size"},
      {"hunyuan_a13b", "num_shared_expert", "[1, 2]", "must be 1 everywhere"},
      {"hunyuan_a13b", "moe_topk", "[8]", "must have one for each of 2 layers"},
      {"ernie_45_21b_a3b", "use_bias", "true", "use_bias is true"},
      {"ernie_45_21b_a3b", "moe_norm_min", "0", "moe_norm_min is 0"},
      {"phi_35_moe", "num_experts_per_tok", "4", "num_experts_per_tok is 4: must be 2"},
      {"longcat_flash", "zero_expert_type", "\"copy\"", "zero_expert_type is \"copy\""},
      {"longcat_flash", "router_bias", "true", "router_bias is true"},
      {"trinity_mini", "route_norm", "false", "route_norm is false"},
      {"nemotron_3_nano", "hybrid_override_pattern", "\"MEX\"",
       "must be a string of M, *, - and E"},
      {"deepseek_v4_flash_bf16", "expert_dtype", "\"int2\"", "expert_dtype is \"int2\""},
      {"mimo_v2_flash", "moe_layer_freq", "[0]", "a list with 0 or 1 for each layer"},
      {"qwen3_30b_a3b", "mlp_only_layers", "[-1]", "mlp_only_layers is [-1]"},
      {"qwen3_30b_a3b", "decoder_sparse_step", "0", "decoder_sparse_step is 0"},
      {"qwen3_30b_a3b", "n_shared_experts", "1", "n_shared_experts is 1: not understood"},
      {"kimi_k3", "activation_situ_beta", "-4", "activation_situ_beta is -4: must be"},
      {"kimi_k3", "routed_expert_hidden_size", "0", "routed_expert_hidden_size is 0"},
      {"kimi_k3", "hidden_act", "\"sitting\"", "hidden_act is 'sitting'"},
      {"kimi_linear_48b_a3b", "moe_router_activation_func", "\"softmax\"", "is \"softmax\""},
      {"inkling_2", "scoring_func", "\"softmax\"", "scoring_func is \"softmax\""},
      {"inkling_2", "mlp_up_softcap", "0", "mlp_up_softcap is 0: must be"},
      {"mistral_large_4", "norm_topk_prob", "false", "norm_topk_prob is false"},
      {"kimi_k3", "activation_situ_beta", "null", "activation_situ_beta is null: must be"},
      {"deepseek_v4_flash_bf16", "swiglu_limit", "null", "swiglu_limit is null: must be"},
      {"qwen3_next_80b_a3b", "norm_topk_prob", "null", "norm_topk_prob is null: must be true or"},
      {"beam", "n_shared_experts", "1", "n_shared_experts is 1"},
      {"beam", "num_shared_experts", "1", "num_shared_experts is 1: must be null or 0"},
      {"beam", "num_experts", "8", "n_group is 8: must leave two experts or more in a group"},
      {"mistral_large_4", "num_experts", "64", "must be equal"},
      {"mistral_large_4", "num_experts_per_tok", "129", "num_experts_per_tok is 129"},
      {"muse_spark", "num_shared_experts", "1", "num_shared_experts is 1"},
      {"ling_3", "num_shared_experts", "null", "num_shared_experts is null: must be an integer"},
      {"ling_3", "scale_router_input", "true", "scale_router_input is true"},
      {"ling_3", "use_nGPT", "true", "use_nGPT is true"},
      {"ling_3", "expert_swiglu_limit_list", "[4]", "a number for each layer"},
      {"ling_3_saved", "num_expert_group", "5", "num_expert_group is 5: must divide"},
      {"ling_3_saved", "num_experts_per_token", "513", "num_experts_per_token is 513"},
      {"qwen3_30b_a3b", "per_layer_config", R"({"3": {"num_experts_per_tok": 4}})",
       "per_layer_config has num_experts_per_tok 4 for layer 3"},
      {"qwen3_30b_a3b", "per_layer_config", R"({"3": {"skip": ["mlp"]}})",
       "per_layer_config has skip [\"mlp\"] for layer 3"},
      {"dots3_note", "moe_layer_freq", "[0]", "a list with 0 or 1 for each layer"},
      {"grok_1", "residual_moe", "true", "residual_moe is true"},
      {"grok_1", "router_logit_softcapping", "-1", "router_logit_softcapping is -1: must be"},
      {"grok_1", "hidden_act", "\"gelish\"", "hidden_act is 'gelish'"},
      {"grok_2", "architectures", "[\"GitForCausalLM\"]", "has experts only as Grok 2"},
      {"grok_2", "router_logit_softcapping", "null", "router_logit_softcapping is null: must be"},
      {"grok_2", "num_shared_experts", "1", "num_shared_experts is 1: not understood"},
      {"arctic", "num_experts_per_tok", "1", "num_experts_per_tok is 1: must be 2 or more"},
      {"arctic", "moe_layer_frequency", "0", "moe_layer_frequency is 0"},
      {"arctic", "quantization", R"({"q_bits": 8})", "quantization is {\"q_bits\":8}"},
      {"minicpm_moe", "num_experts_per_tok", "9", "must be at most the number of experts, 8"},
      {"minicpm_moe", "n_shared_experts", "1", "n_shared_experts is 1: not understood"},
      {"smallthinker_4b", "moe_enable_secondary_experts", "true", "secondary_experts is true"},
      {"smallthinker_4b", "moe_enable_early_router", "false", "moe_enable_early_router is false"},
      {"smallthinker_4b", "moe_shared_primary_experts", "1", "moe_shared_primary_experts is 1"},
      {"smallthinker_4b", "moe_layer_layout", "[1, 0]", "moe_layer_layout is [1,0]"},
      {"smallthinker_4b", "moe_intermediate_size", "512", "must be equal"},
      {"smallthinker_4b", "norm_topk_prob", "false", "norm_topk_prob is false"},
      {"xverse_moe", "norm_topk_prob", "false", "norm_topk_prob is false"},
      {"xverse_moe", "moe_top_k", "65", "moe_top_k is 65"},
  };
  const std::vector<Published> all = published_configs();
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.config_of) + ": " + c.field + " = " + c.value);
    const auto found = std::find_if(all.begin(), all.end(), [&](const Published& p) {
      return std::string(p.name) == c.config_of;
    });
    ASSERT_NE(found, all.end());
    nlohmann::json json = nlohmann::json::parse(found->config);
    nlohmann::json& object = json.contains("text_config") ? json["text_config"] : json;
    object[c.field] = nlohmann::json::parse(c.value);
    const std::string message =
        test::error_of([&] { layer_spec_from_config(json.dump(), found->layer); });
    EXPECT_NE(message.find(c.message), std::string::npos) << message;
  }
}

// Later transformers write one type a layer instead of a number of dense ones.
TEST(Families, TypesOfLayersComeBeforeTheirNumber) {
  for (const Published& p : published_configs()) {
    if (std::string(p.name) != "deepseek_v3") continue;
    nlohmann::json json = nlohmann::json::parse(p.config);
    json["num_hidden_layers"] = 3;
    json["mlp_layer_types"] = {"sparse", "dense", "sparse"};
    const Model model = read_model("config.json", json.dump());
    EXPECT_TRUE(model.moe(0) && !model.moe(1) && model.moe(2));
    json["mlp_layer_types"] = {"sparse", "moe", "dense"};
    EXPECT_NE(test::error_of([&] { read_model("config.json", json.dump()); }).find("holds 'moe'"),
              std::string::npos);
  }
}

const Published& published(std::string_view name) {
  static const std::vector<Published> all = published_configs();
  return *std::find_if(all.begin(), all.end(), [&](const Published& p) { return p.name == name; });
}

TEST(Families, LimitsOfLing3sLastLayers) {
  const auto limits = [](int layer) {
    const LayerSpec spec = layer_spec_from_config(published("ling_3").config, layer);
    return std::pair(spec.experts.activation.limit, spec.shared.activation.limit);
  };
  EXPECT_EQ(limits(33), std::pair(0.0F, 0.0F));
  EXPECT_EQ(limits(34), std::pair(0.0F, 5.0F));
  EXPECT_EQ(limits(41), std::pair(4.0F, 7.0F));
  const LayerSpec last = layer_spec_from_config(published("ling_3").config, 41);
  EXPECT_EQ(last.experts.activation.limit_on, LimitOn::output);
}

TEST(Families, GroupsHoldWhatIsChosen) {
  nlohmann::json json = nlohmann::json::parse(published("beam").config);
  json["topk_group"] = 1;
  json["num_experts_per_tok"] = 33;
  EXPECT_NE(test::error_of([&] {
              layer_spec_from_config(json.dump(), 3);
            }).find("topk_group is 1: 1 groups of 32 experts hold fewer than the 33 to choose"),
            std::string::npos);
}

TEST(Families, AnNGroupOfNullIsNoGroups) {
  nlohmann::json json = nlohmann::json::parse(published("beam").config);
  json["n_group"] = json["topk_group"] = nullptr;
  EXPECT_EQ(layer_spec_from_config(json.dump(), 3).route.groups, Groups{});
}

TEST(Families, NullSharedExpertsAreNone) {
  nlohmann::json json = nlohmann::json::parse(published("deepseek_v3").config);
  json.erase("n_shared_experts");
  EXPECT_EQ(layer_spec_from_config(json.dump(), 3).shared.intermediate, 2048);
  json["n_shared_experts"] = nullptr;
  EXPECT_EQ(layer_spec_from_config(json.dump(), 3).shared.intermediate, 0);
}

TEST(Families, ALayersOwnFieldsMayBeOfAttention) {
  nlohmann::json json = nlohmann::json::parse(published("qwen3_30b_a3b").config);
  json["per_layer_config"] = {{"3", {{"head_dim", 512}, {"num_experts_per_tok", 8}}}};
  EXPECT_EQ(layer_spec_from_config(json.dump(), 3), published("qwen3_30b_a3b").expected);
}

// A width without the norm, an activation with another one's numbers, and neither.
TEST(Families, KimiK3InParts) {
  const auto spec_with = [](const char* field, const nlohmann::json& value) {
    for (const Published& p : published_configs()) {
      if (std::string(p.name) != "kimi_k3") continue;
      nlohmann::json json = nlohmann::json::parse(p.config);
      json["text_config"][field] = value;
      return layer_spec_from_config(json.dump(), 1);
    }
    return LayerSpec{};
  };
  EXPECT_EQ(spec_with("latent_moe_use_norm", false).latent_norm, NormSpec{});
  EXPECT_EQ(spec_with("hidden_act", "silu").experts.activation, ActivationSpec{});
  EXPECT_EQ(spec_with("activation_situ_linear_beta", nullptr).experts.activation,
            (ActivationSpec{.kind = Activation::situ, .beta = 4}));
  const LayerSpec plain = spec_with("routed_expert_hidden_size", nullptr);
  EXPECT_EQ(plain.latent, 0);
  EXPECT_EQ(plain.experts.hidden, 7168);
  EXPECT_EQ(plain.latent_norm, NormSpec{});
}

TEST(Families, TheTableHasEachOnceAndKnowsThemAll) {
  std::set<std::string_view> types;
  for (const Family& family : family_table()) EXPECT_TRUE(types.insert(family.type).second);
  for (const Refusal& refusal : refusal_table()) EXPECT_TRUE(types.insert(refusal.type).second);
  const std::vector<std::string> known = known_families();
  EXPECT_EQ(known.size(), family_table().size());
  EXPECT_TRUE(std::is_sorted(known.begin(), known.end()));
}

// Step-3.5's list of layers, as published ("4,5,6"), and as a list of numbers.
TEST(Families, LayersThatStep35Enumerates) {
  const auto moe = [](const nlohmann::json& list) {
    const nlohmann::json json = {
        {"model_type", "step3p5"}, {"hidden_size", 64},      {"moe_intermediate_size", 32},
        {"moe_num_experts", 8},    {"moe_top_k", 2},         {"share_expert_dim", 32},
        {"num_hidden_layers", 12}, {"moe_layers_enum", list}};
    const Model model = read_model("config.json", json.dump());
    std::vector<int> layers;
    for (int i = 0; i < 12; ++i) {
      if (model.moe(i)) layers.push_back(i);
    }
    return layers;
  };
  EXPECT_EQ(moe("4,5, 9,11"), (std::vector<int>{4, 5, 9, 11}));
  EXPECT_EQ(moe("0"), (std::vector<int>{0}));
  EXPECT_EQ(moe(nlohmann::json{2, 9}), (std::vector<int>{2, 9}));
  EXPECT_EQ(moe(nullptr), (std::vector<int>{3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_NE(test::error_of([&] { moe("4;5"); }).find("layer numbers, separated by commas"),
            std::string::npos);
}

// K-EXAONE says its layers twice.
TEST(Families, FlagsOfExaonesLayersAgree) {
  nlohmann::json json = {{"model_type", "exaone_moe"},  {"hidden_size", 64},
                         {"moe_intermediate_size", 32}, {"num_experts", 8},
                         {"num_experts_per_tok", 2},    {"num_hidden_layers", 3},
                         {"first_k_dense_replace", 1},  {"is_moe_layer", {false, true, true}}};
  const Model model = read_model("config.json", json.dump());
  EXPECT_TRUE(!model.moe(0) && model.moe(1) && model.moe(2));
  for (const nlohmann::json& wrong :
       {nlohmann::json{true, true, true}, nlohmann::json{false, true}, nlohmann::json(true)}) {
    json["is_moe_layer"] = wrong;
    EXPECT_NE(test::error_of([&] { read_model("config.json", json.dump()); }).find("is_moe_layer"),
              std::string::npos)
        << wrong;
  }
}

// Members of families of experts that have none.
TEST(Families, DenseMembers) {
  const Model nemotron = read_model(
      "config.json",
      R"({"model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "M-*M",
          "num_hidden_layers": 4, "mlp_hidden_act": "relu2", "mlp_bias": false})");
  EXPECT_EQ(nemotron.plan.layers.size(), 4U);
  const Model granite = read_model(
      "config.json", R"({"model_type": "granitemoehybrid", "hidden_size": 64, "hidden_act": "silu",
                         "num_hidden_layers": 3, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "shared_intermediate_size": 128})");
  EXPECT_EQ(granite.plan.layers.size(), 3U);
  const Model minicpm = read_model(
      "config.json", R"({"model_type": "minicpm", "hidden_size": 64, "hidden_act": "silu",
                         "num_hidden_layers": 3, "intermediate_size": 128})");
  const Model xverse =
      read_model("config.json", R"({"model_type": "xverse", "hidden_size": 64, "hidden_act": "silu",
                         "num_hidden_layers": 3, "intermediate_size": 128, "num_experts": null})");
  for (const Model* model : {&nemotron, &granite, &minicpm, &xverse}) {
    EXPECT_GE(model->plan.layers.size(), 3U);
    for (int i = 0; i < 4; ++i) EXPECT_FALSE(model->moe(i)) << i;
  }
}

// Every other one where nothing says so; the dense MLP beside the experts is not of the block.
TEST(Families, LayersOfArctic) {
  nlohmann::json json = nlohmann::json::parse(published("arctic").config);
  const Model all = read_model("config.json", json.dump());
  EXPECT_NE(all.plan.beside.find("residual_mlp"), std::string::npos);
  for (const char* field : {"moe_layer_frequency", "parallel_attn_mlp_res", "use_residual"}) {
    json.erase(field);
  }
  const Model model = read_model("config.json", json.dump());
  EXPECT_TRUE(!model.moe(0) && model.moe(1) && !model.moe(2) && model.moe(33) && !model.moe(34));
  EXPECT_EQ(model.plan.beside, "");
}

// Grok 2 without the dense half of a layer, a width or a cap of its own; and what engines read of
// either Grok that no published config has.
TEST(Families, GrokInParts) {
  nlohmann::json json = nlohmann::json::parse(published("grok_2").config);
  for (const char* field : {"residual_moe", "moe_intermediate_size", "router_logit_softcapping"}) {
    json.erase(field);
  }
  const LayerSpec plain = layer_spec_from_config(json.dump(), 0);
  EXPECT_EQ(plain.shared.intermediate, 0);
  EXPECT_EQ(plain.route.scale, 1);
  EXPECT_EQ(plain.experts.intermediate, 32768);
  EXPECT_EQ(plain.route.soft_cap, 30);
  json = nlohmann::json::parse(published("grok_1").config);
  json["moe_router_renormalize"] = true;
  json["router_logit_softcapping"] = 30;
  json["hidden_act"] = "gelu";
  const LayerSpec other = layer_spec_from_config(json.dump(), 0);
  EXPECT_TRUE(other.route.renormalize);
  EXPECT_EQ(other.route.soft_cap, 30);
  EXPECT_EQ(other.experts.activation, (ActivationSpec{.kind = Activation::gelu}));
}

TEST(Families, NullSharedExpertsOfXverseAreNone) {
  nlohmann::json json = nlohmann::json::parse(published("xverse_moe").config);
  json["num_shared_experts"] = nullptr;
  EXPECT_EQ(layer_spec_from_config(json.dump(), 0).shared.intermediate, 0);
}

TEST(Families, RefusedByNameWithTheReason) {
  const std::pair<const char*, const char*> refused[] = {
      {"grove_moe", "a smaller one that its group has in common"},
      {"Motif", "its activation is PolyNorm"},
      {"doge", "found by product keys"}};
  for (const auto& [type, reason] : refused) {
    Status status = Status::ok;
    const std::string message = test::error_of(
        [&, name = type] {
          read_model("config.json", nlohmann::json{{"model_type", name}}.dump());
        },
        &status);
    EXPECT_EQ(status, Status::unsupported);
    EXPECT_NE(message.find(fmt::format("model_type is '{}': not supported, ", type)),
              std::string::npos)
        << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  }
}

// Groups of Nemotron-3, which no published one has.
TEST(Families, GroupsOfNemotron) {
  nlohmann::json json = nlohmann::json::parse(published("nemotron_3_nano").config);
  json["n_group"] = 8;
  json["topk_group"] = 4;
  const int layer = published("nemotron_3_nano").layer;
  EXPECT_EQ(layer_spec_from_config(json.dump(), layer).route.groups,
            (Groups{.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2}));
  json["n_group"] = 7;
  json["topk_group"] = 1;
  EXPECT_NE(test::error_of([&] {
              layer_spec_from_config(json.dump(), layer);
            }).find("a divisor of n_routed_experts"),
            std::string::npos);
}

// Activations by transformers' names.
TEST(Families, ActivationsByName) {
  const struct {
    const char* name;
    ActivationSpec spec;
  } cases[] = {{"silu", {}},
               {"swish", {}},
               {"gelu", {.kind = Activation::gelu}},
               {"gelu_python", {.kind = Activation::gelu}},
               {"gelu_new", {.kind = Activation::gelu_tanh}},
               {"gelu_pytorch_tanh", {.kind = Activation::gelu_tanh}},
               {"gelu_python_tanh", {.kind = Activation::gelu_tanh}},
               {"quick_gelu", {.alpha = 1.702f}},
               {"relu", {.kind = Activation::relu}},
               {"relu2", {.kind = Activation::relu2}}};
  for (const auto& c : cases) {
    nlohmann::json json = nlohmann::json::parse(published("mixtral_8x7b").config);
    json["hidden_act"] = c.name;
    EXPECT_EQ(layer_spec_from_config(json.dump(), 0).experts.activation, c.spec) << c.name;
  }
}

// Its code masks groups with 0, which a negative bias makes another rule than -inf.
TEST(Families, GroupsOfAXK2AreRefused) {
  nlohmann::json json =
      nlohmann::json::parse(test::read_file(test::golden("axk2") + "/config.json"));
  const auto message = [&](int groups) {
    json["n_group"] = json["topk_group"] = groups;
    return test::error_of([&] { read_model("config.json", json.dump()); });
  };
  EXPECT_EQ(message(1), "");
  EXPECT_NE(message(2).find("n_group is 2: groups of A.X K2 are not understood"),
            std::string::npos);
}

// Its routed experts compute SiLU whatever the config says.
TEST(Families, AriasActivationIsOfItsSharedExperts) {
  nlohmann::json json =
      nlohmann::json::parse(test::read_file(test::golden("aria") + "/config.json"));
  json["text_config"]["hidden_act"] = "gelu";
  const LayerSpec spec = layer_spec_from_config(json.dump(), 0);
  EXPECT_EQ(spec.experts.activation, ActivationSpec{});
  EXPECT_EQ(spec.shared.activation, (ActivationSpec{.kind = Activation::gelu}));
}

}  // namespace
}  // namespace shunt
