// The table of model families: one row each. What a row's function reads of config.json, and what
// it reads nothing of, is in families/*.cpp.
#include "checkpoint/families.hpp"

#include <algorithm>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

const std::vector<Family>& family_table() {
  namespace f = families;
  static const std::vector<Family> table = {
      // softmax over all experts
      {"mixtral", "Mixtral", f::mixtral},
      {"minimax", "MiniMax-Text-01, M1", f::minimax},
      {"minimax_text_01", "MiniMax-Text-01, VL-01", f::minimax},
      {"minimax_m1", "MiniMax-M1", f::minimax},
      {"qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", f::qwen2_moe},
      {"qwen3_moe", "Qwen3-MoE", f::qwen3_moe},
      {"interns1_pro", "Intern-S1-Pro", f::sdar_moe},
      {"interns1_pro_text", "Intern-S1-Pro", f::sdar_moe},
      {"sdar_moe", "SDAR-MoE", f::sdar_moe},
      {"rnd1", "RND1", f::rnd1},
      {"PanguProMoE", "Pangu Pro MoE", f::pangu_pro_moe},
      {"llada_moe", "LLaDA-MoE", f::llada_moe},
      {"iquest_q1", "IQuest Q1", f::iquest_q1},
      {"qwen3_next", "Qwen3-Next", f::qwen3_next},
      {"qwen3_vl_moe_text", "Qwen3-VL-MoE", f::qwen3_vl_moe},
      {"qwen3_5_moe_text", "Qwen3.5-MoE", f::qwen3_5_moe},
      {"qwen4_exp_text", "Qwen4", f::qwen3_next},
      {"qwen3_omni_moe_text", "Qwen3-Omni-MoE (thinker)", f::qwen3_omni_moe},
      {"mellum", "Mellum", f::mellum},
      {"lara_mini", "Lara Mini", f::lara_mini},
      {"olmoe", "OLMoE", f::olmoe},
      {"flex_olmo", "FlexOlmo", f::olmoe},
      {"deepseek", "DeepSeek-MoE", f::deepseek_v2},
      {"deepseek_v2", "DeepSeek-V2, VL2", f::deepseek_v2},
      {"bailing_moe", "Ling, Ring", f::bailing_moe},
      {"deepseek_ocr2_text", "DeepSeek-OCR 2", f::deepseek_ocr2},
      {"unlimited_ocr_text", "Unlimited-OCR", f::deepseek_ocr2},
      {"unlimited_language", "Unlimited-OCR", f::deepseek_ocr2},
      {"step3_text", "Step-3", f::step3},
      {"mistral4", "Mistral 4", f::mistral4},
      {"mistral_large4_text", "Mistral Large 4", f::mistral_large4},
      {"hunyuan_v1_moe", "Hunyuan-A13B", f::hunyuan_v1_moe},
      {"ernie4_5_moe", "ERNIE 4.5", f::ernie4_5_moe},
      {"ernie4_5_vl_moe_text", "ERNIE 4.5 VL (text experts)", f::ernie4_5_vl_moe},
      {"ernie4_5_moe_vl", "ERNIE 4.5 VL as published (text experts)", f::ernie4_5_moe_vl},
      {"jamba", "Jamba", f::jamba},
      {"dbrx", "DBRX", f::dbrx},
      {"longcat_flash", "LongCat-Flash", f::longcat_flash},
      {"longcat_flash_ngram", "LongCat-Flash-Lite", f::longcat_flash},
      {"gemma4_text", "Gemma 4", f::gemma4},
      {"grok-1", "Grok-1", f::grok1},
      {"git", "Grok 2", f::grok2},
      {"arctic", "Snowflake Arctic", f::arctic},
      {"minicpm", "MiniCPM-MoE", f::minicpm},
      {"xverse", "XVERSE-MoE", f::xverse},
      {"smallthinker", "SmallThinker", f::smallthinker},
      // softmax over the chosen ones
      {"gpt_oss", "gpt-oss", f::gpt_oss},
      {"openai_privacy_filter", "OpenAI privacy filter", f::openai_privacy_filter},
      {"granitemoe", "Granite-MoE", f::granitemoe},
      {"granitemoeshared", "Granite-MoE with a shared MLP", f::granitemoe},
      {"granitemoehybrid", "Granite 4 hybrid", f::granitemoehybrid},
      {"granitemoe_swa", "Granite-MoE with sliding windows", f::granitemoe},
      {"jetmoe", "JetMoE", f::jetmoe},
      {"aria_text", "Aria", f::aria},
      {"cohere2_moe", "Cohere 2 MoE", f::cohere2_moe},
      {"phimoe", "Phi-3.5-MoE", f::phimoe},
      // sigmoid
      {"llama4_text", "Llama 4", f::llama4},
      {"deepseek_v3", "DeepSeek-V3, R1, V3.1", f::deepseek_v3},
      {"kimi_k2", "Kimi K2", f::deepseek_v3},
      {"deepseek_v32", "DeepSeek-V3.2", f::deepseek_v32},
      {"dots_vlm", "dots.vlm1", f::deepseek_v3},
      {"gigachat3_5", "GigaChat 3.5", f::gigachat3_5},
      {"deepseek_v4", "DeepSeek-V4", f::deepseek_v4},
      {"deepseek_v41", "DeepSeek-V4.1 (text tokens)", f::deepseek_v41},
      {"deepseek_v41_text", "DeepSeek-V4.1 (text tokens)", f::deepseek_v41},
      {"pangu_ultra_moe", "openPangu Ultra MoE", f::pangu},
      {"openpangu_v2", "openPangu 2.0", f::pangu},
      {"glm4_moe", "GLM-4.5, 4.6, 4.7", f::glm4_moe},
      {"glm4v_moe_text", "GLM-4.5V", f::glm4_moe},
      {"glm4_moe_lite", "GLM-4.7-Flash", f::glm4_moe_lite},
      {"glm_moe_dsa", "GLM-5", f::glm_moe_dsa},
      {"glm5_next_text", "GLM-5 Next", f::glm5_next},
      {"sarvam_moe", "Sarvam 30B", f::sarvam},
      {"sarvam_mla", "Sarvam 105B", f::sarvam},
      {"solar_open", "Solar Open", f::solar_open},
      {"axk1", "A.X K1", f::axk1},
      {"axk2", "A.X K2", f::axk2},
      {"dots1", "dots.llm1", f::dots1},
      {"dots3_note", "dots3.note", f::dots3_note},
      {"dots3_note_text", "dots3.note (text experts)", f::dots3_note},
      {"beam", "Beam", f::beam},
      {"mimo_v2_flash", "MiMo-V2-Flash", f::mimo_v2_flash},
      {"mimo_v2", "MiMo-V2.5", f::mimo_v2_flash},
      {"bailing_moe_v2", "Ling 2, Ring 2", f::bailing_moe_v2},
      {"bailing_moe_linear", "Ring 2 linear", f::bailing_moe_v2},
      {"bailing_hybrid", "Ling 2.5, 3", f::bailing_hybrid},
      {"llada2_moe", "LLaDA 2", f::llada2_moe},
      {"param2moe", "Param2-17B MoE", f::param2moe},
      {"exaone_moe", "K-EXAONE", f::exaone_moe},
      {"kimi_linear", "Kimi Linear, K3 (text)", f::kimi_linear},
      {"kimi_k3", "Kimi K3", f::kimi_linear},
      {"hy_v3", "Hunyuan 3", f::hy_v3},
      {"hy_v4", "Hunyuan 4", f::hy_v4},
      {"hy_v4_vl_text", "Hunyuan 4 VL", f::hy_v4},
      {"minimax_m2", "MiniMax-M2", f::minimax_m2},
      {"minimax_m3_vl_text", "MiniMax-M3", f::minimax_m3},
      {"minimax_m3_text", "MiniMax-M3", f::minimax_m3},
      {"lfm2_moe", "LFM2-MoE", f::lfm2_moe},
      {"afmoe", "Trinity (AFMoE)", f::afmoe},
      {"laguna", "Laguna", f::laguna},
      {"step3p5", "Step-3.5, 3.7", f::step3p5},
      {"step5", "Step-5", f::step5},
      {"nemotron_h", "Nemotron-3", f::nemotron_h},
      {"nemotron_h_puzzle", "Nemotron-3 Puzzle", f::nemotron_h_puzzle},
      {"alice_ai", "Alice AI", f::alice_ai},
      {"k2_horizon", "K2 Horizon", f::k2_horizon},
      {"xllm", "xLLM", f::k2_horizon},
      {"inkling_text", "Inkling", f::inkling},
      {"inkling2_text", "Inkling 2", f::inkling2},
      {"inkling2_loop_text", "Inkling 2 Loop", f::inkling2},
      {"flint", "Flint", f::flint},
      {"muse_spark_text", "Muse Spark", f::muse_spark},
      {"kolibri1", "Kolibri 1", f::kolibri1},
  };
  return table;
}

const std::vector<Refusal>& refusal_table() {
  static const std::vector<Refusal> table = {
      {"doge", "its experts are single vectors found by product keys, not MLPs"},
      {"zaya", "its router is a network that reads the router of the layer before"},
      {"switch_transformers",
       "its experts have a capacity: a token's result depends on the others"},
      {"nllb-moe", "its experts have a capacity: a token's result depends on the others"},
      {"qwen3_omni_moe_talker_text", "only the thinker is read"},
      {"grove_moe", "beside each chosen expert runs a smaller one that its group has in common"},
      {"Motif", "its activation is PolyNorm, with coefficients that each expert has learned"},
      {"diffusion_gemma_text", "its MoE block is run inside a diffusion loop that is not read"},
  };
  return table;
}

// ---- what the rows are made of ----------------------------------------------------------------

ActivationSpec activation_by_name(const Config& config, std::string_view field,
                                  const std::string& name) {
  ActivationSpec spec;
  if (name == "silu" || name == "swish") return spec;
  if (name == "gelu" || name == "gelu_python") {
    spec.kind = Activation::gelu;
  } else if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_python_tanh") {
    spec.kind = Activation::gelu_tanh;
  } else if (name == "quick_gelu") {
    spec.alpha = 1.702f;
  } else if (name == "relu") {
    spec.kind = Activation::relu;
  } else if (name == "relu2") {
    spec.kind = Activation::relu2;
  } else if (name == "situ") {
    spec.kind = Activation::situ;
  } else {
    fail(Status::unsupported,
         "{}: {} is '{}': only silu, swish, gelu, gelu_python, gelu_new, gelu_pytorch_tanh, "
         "gelu_python_tanh, quick_gelu, relu, relu2 and situ are understood",
         config.where(), field, clean(name));
  }
  return spec;
}

namespace {

// SiTU's, which Kimi K3 names so. Fields of another activation mean nothing.
void add_betas(ActivationSpec& activation, Config& config) {
  constexpr std::string_view beta = "activation_situ_beta";
  constexpr std::string_view linear_beta = "activation_situ_linear_beta";
  if (activation.kind != Activation::situ) return config.ignore({beta, linear_beta});
  if (!config.has(beta)) config.refuse(beta, "a number, with hidden_act situ");
  activation.beta = static_cast<float>(config.number_or({beta}, 1, 1e-6, 1e6));
  activation.linear_beta = static_cast<float>(config.number_or({linear_beta}, 0, 1e-6, 1e6));
}

}  // namespace

Plan start(Config& config, const Basics& basics, std::int64_t experts, std::int64_t top_k,
           std::int64_t intermediate) {
  Plan plan;
  LayerSpec& spec = plan.spec;
  spec.hidden = config.integer(basics.hidden, 1, max_width);
  if (!basics.layers.empty()) {
    plan.layers.resize(static_cast<std::size_t>(config.integer(basics.layers, 1, max_layers)));
  }
  if (top_k > experts) {
    fail(Status::bad_file, "{}: {} is {}: must be at most the number of experts, {}",
         config.where(), config.name_of(basics.top_k), top_k, experts);
  }
  spec.route.experts = static_cast<int>(experts);
  spec.route.top_k = static_cast<int>(top_k);
  spec.experts.experts = static_cast<int>(experts);
  spec.experts.hidden = spec.hidden;
  spec.experts.intermediate = intermediate;
  if (!basics.act_field.empty()) {
    spec.experts.activation =
        activation_by_name(config, basics.act_field, config.text_or({basics.act_field}, "silu"));
    add_betas(spec.experts.activation, config);
  }
  plan.names = standard_names();
  config.ignore({"output_router_logits", "router_aux_loss_coef", "router_z_loss_coef",
                 "router_jitter_noise", "input_jitter_noise", "router_dtype", "moe_router_dtype",
                 "experts_implementation", "use_grouped_mm"});
  // Of shared experts and dense layers only, where it means anything.
  config.expect_false({"mlp_bias"});
  return plan;
}

Plan start(Config& config, const Basics& basics) {
  const std::int64_t experts = config.integer(basics.experts, 1, max_experts);
  const std::int64_t top_k = config.integer(basics.top_k, 1, max_choices);
  const std::int64_t intermediate = config.integer(basics.intermediate, 1, max_width);
  return start(config, basics, experts, top_k, intermediate);
}

Plan without_experts(Config& config, const Config::Names& fields) {
  Plan plan = start(config, {.top_k = {""}}, 1, 1, 1);
  config.ignore(fields);
  layers_by(
      plan, [](int) { return false; }, "dense MLP");
  return plan;
}

void add_shared(Plan& plan, std::int64_t width, const std::string& module) {
  if (width == 0) return;
  plan.spec.shared.intermediate = width;
  plan.spec.shared.activation = plan.spec.experts.activation;
  plan.names.shared.push_back(each_expert(module));
}

void add_shared_count(Plan& plan, Config& config, const Config::Names& count, std::int64_t absent,
                      const std::string& module) {
  // Code of models asks whether it is None: then there are none, whatever absence means. Tensors
  // that say otherwise are found as left over.
  const bool none = std::any_of(count.begin(), count.end(),
                                [&](std::string_view name) { return config.is_null(name); });
  const std::int64_t number = config.integer_if(count, 0, max_experts).value_or(none ? 0 : absent);
  add_shared(plan, number * plan.spec.experts.intermediate, module);
}

void route_softmax(Plan& plan, bool renormalize) {
  plan.spec.route.score = Score::softmax;
  plan.spec.route.renormalize = renormalize;
}

void route_top_k_softmax(Plan& plan) {
  plan.spec.route.score = Score::softmax;
  plan.spec.route.score_stage = ScoreStage::after_top_k;
}

void route_sigmoid_bias(Plan& plan, bool renormalize, double epsilon, double scale) {
  RouteSpec& route = plan.spec.route;
  route.score = Score::sigmoid;
  route.selection_bias = true;
  route.renormalize = renormalize;
  route.renormalize_epsilon = static_cast<float>(epsilon);
  route.scale = static_cast<float>(scale);
}

void layers_by(Plan& plan, const std::function<bool(int)>& sparse, const std::string& note) {
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    if (!sparse(static_cast<int>(i))) plan.layers[i] = {false, note};
  }
}

void layers_by_step(Plan& plan, Config& config, const std::vector<std::int64_t>& absent) {
  const std::int64_t step = config.integer_or({"decoder_sparse_step"}, 1, 1, max_layers);
  const auto dense = config.integers({"mlp_only_layers"}, 0, max_layers).value_or(absent);
  layers_by(
      plan,
      [&](int i) {
        return (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
      },
      "dense MLP");
}

std::function<bool(int)> from(std::int64_t first) {
  return [first](int i) { return i >= first; };
}

void layers_by_type(Plan& plan, Config& config, const std::function<bool(int)>& otherwise) {
  const auto types = config.texts({"mlp_layer_types"});
  if (!types) return layers_by(plan, otherwise, "dense MLP");
  if (types->size() < plan.layers.size()) {
    fail(Status::bad_file,
         "{}: mlp_layer_types has {} entries: must have one for each of {} layers", config.where(),
         types->size(), plan.layers.size());
  }
  for (const std::string& type : *types) {
    if (type != "sparse" && type != "dense") {
      fail(Status::bad_file, "{}: mlp_layer_types holds '{}': must be sparse or dense",
           config.where(), clean(type));
    }
  }
  layers_by(
      plan, [&](int i) { return (*types)[static_cast<std::size_t>(i)] == "sparse"; }, "dense MLP");
}

void layers_from(Plan& plan, Config& config, std::int64_t absent) {
  config.expect("moe_layer_freq", {1});
  const std::int64_t first = config.integer_or({"first_k_dense_replace"}, absent, 0, max_layers);
  layers_by_type(plan, config, from(first));
}

void limits_by_layer(Plan& plan, Config& config, const char* of_experts, const char* of_shared) {
  const auto limits = config.numbers({of_experts}, 0, 0, 1e30);
  const auto shared = config.numbers({of_shared}, 0, 0, 1e30);
  for (const auto& [name, list] : {std::pair(of_experts, &limits), std::pair(of_shared, &shared)}) {
    if (*list && (*list)->size() < plan.layers.size()) {
      config.refuse(name, "a number for each layer");
    }
  }
  plan.per_layer = [limits, shared](int layer, LayerSpec& spec) {
    const auto limit = [&](ActivationSpec& activation, const auto& list) {
      const double here = list ? (*list)[static_cast<std::size_t>(layer)] : 0;
      activation.limit = static_cast<float>(here);
      if (here > 0) activation.limit_on = LimitOn::output;
    };
    limit(spec.experts.activation, limits);
    limit(spec.shared.activation, shared);
  };
}

ExpertNames each_expert(const std::string& prefix, const char* gate, const char* up,
                        const char* down) {
  return {.form = ExpertNames::Form::each,
          .gate = fmt::format("{}.{}.weight", prefix, gate),
          .up = fmt::format("{}.{}.weight", prefix, up),
          .down = fmt::format("{}.{}.weight", prefix, down)};
}

ExpertNames merged_experts(const std::string& prefix, const char* up, const char* down) {
  return {.form = ExpertNames::Form::merged,
          .gate = {},
          .up = fmt::format("{}.{}", prefix, up),
          .down = fmt::format("{}.{}", prefix, down)};
}

ExpertNames single_experts(const TensorNames& names) {
  for (const ExpertNames& each : names.experts) {
    if (each.form == ExpertNames::Form::each && each.up.ends_with(".weight")) return each;
  }
  const ExpertNames& first = names.experts.front();
  std::string prefix = fmt::format(".{}", first.up);
  const std::size_t list = prefix.find(".experts.");
  if (list != std::string::npos) {
    prefix.resize(list);
  } else {  // "moe.gate_proj.weight"
    if (prefix.ends_with(".weight")) prefix.resize(prefix.rfind('.'));
    prefix.resize(prefix.rfind('.'));
  }
  ExpertNames single = each_expert(fmt::format("{}.experts.{{}}", prefix).substr(1));
  single.up_bias = first.up_bias;
  single.down_bias = first.down_bias;
  single.interleaved = first.interleaved;
  return single;
}

TensorNames standard_names(const std::string& module) {
  TensorNames names;
  names.module = module;
  names.router = {{module + ".gate.weight"}};
  names.experts = {each_expert(module + ".experts.{}"), merged_experts(module + ".experts")};
  return names;
}

}  // namespace shunt
