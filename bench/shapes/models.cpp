// Shapes and rules as each model's config.json and its own code have them. To add a model, add a
// line to models().
#include "bench/shapes/models.hpp"

#include <cctype>

namespace shunt::bench {

LayerSpec plain_layer(std::int64_t hidden, std::int64_t intermediate, int experts, int top_k) {
  LayerSpec spec;
  spec.hidden = hidden;
  spec.route.experts = experts;
  spec.route.top_k = top_k;
  spec.route.renormalize = true;
  spec.route.renormalize_epsilon = 0;
  spec.experts.experts = experts;
  spec.experts.hidden = hidden;
  spec.experts.intermediate = intermediate;
  return spec;
}

namespace {

// Every rule below starts from plain_layer.

LayerSpec with_shared(LayerSpec spec, std::int64_t intermediate, bool sigmoid_gate = false) {
  spec.shared.intermediate = intermediate;
  spec.shared.activation = spec.experts.activation;
  spec.shared.sigmoid_gate = sigmoid_gate;
  return spec;
}

// Softmax over all, weights as they are: Qwen2-MoE, OLMoE, DeepSeek-V2-Lite, Hunyuan-Large.
LayerSpec unnormalised(LayerSpec spec) {
  spec.route.renormalize = false;
  return spec;
}

// The k best logits, then a softmax over these.
LayerSpec softmax_of_top_k(LayerSpec spec) {
  spec.route.score_stage = ScoreStage::after_top_k;
  spec.route.renormalize = false;
  return spec;
}

// Sigmoid scores, selected with a bias, renormalised: DeepSeek-V3 and its kin.
LayerSpec biased_sigmoid(LayerSpec spec, float scale, Groups groups = {}, float epsilon = 1e-20f) {
  spec.route.renormalize_epsilon = epsilon;
  spec.route.score = Score::sigmoid;
  spec.route.selection_bias = true;
  spec.route.groups = groups;
  spec.route.scale = scale;
  return spec;
}

LayerSpec deepseek_v2(LayerSpec spec) {
  spec = unnormalised(spec);
  spec.route.groups = {.count = 8, .keep = 3, .rank_by = GroupRank::max};
  spec.route.scale = 16;
  return spec;
}

// Of the layers that choose by scores: the first three take ids from a table.
LayerSpec deepseek_v4(LayerSpec spec, float scale) {
  spec = biased_sigmoid(spec, scale);
  spec.route.score = Score::sqrt_softplus;
  spec.experts.activation.limit = 10;
  return spec;
}

LayerSpec with_clamped_swiglu(LayerSpec spec) {
  spec.experts.activation = {.alpha = 1.702f, .limit = 7, .up_offset = 1};
  return spec;
}

LayerSpec gpt_oss(LayerSpec spec) {
  spec = with_clamped_swiglu(softmax_of_top_k(spec));
  spec.route.router_bias = true;
  spec.experts.gate_up_bias = true;
  spec.experts.down_bias = true;
  return spec;
}

LayerSpec llama4(LayerSpec spec) {
  spec.route.score = Score::sigmoid;
  spec.route.score_stage = ScoreStage::after_top_k;
  spec.route.renormalize = false;
  spec.route.weight_on_input = true;
  return spec;
}

LayerSpec ernie(LayerSpec spec) {
  spec.route.selection_bias = true;
  spec.route.renormalize_epsilon = 1e-12f;
  spec.route.epsilon_rule = EpsilonRule::floor;
  return spec;
}

LayerSpec phi(LayerSpec spec) {
  spec.route.score = Score::sparsemixer;
  spec.route.jitter = 0.01f;
  spec.route.renormalize = false;
  return spec;
}

LayerSpec grok(LayerSpec spec) {
  spec = unnormalised(spec);
  spec.route.soft_cap = 30;
  spec.experts.activation.kind = Activation::gelu_tanh;
  return spec;
}

// Experts between projections to and from `latent`.
LayerSpec with_latent(LayerSpec spec, std::int64_t latent) {
  spec.latent = spec.experts.hidden = latent;
  return spec;
}

LayerSpec with_situ(LayerSpec spec) {
  spec.experts.activation = {.kind = Activation::situ, .beta = 4, .linear_beta = 25};
  return spec;
}

LayerSpec kimi_k3(LayerSpec spec) {
  spec = with_latent(with_situ(biased_sigmoid(spec, 1)), 3584);
  spec.latent_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
  return spec;
}

LayerSpec nemotron_3_super(LayerSpec spec) {
  spec = with_latent(biased_sigmoid(spec, 5), 1024);
  spec.experts.activation = {.kind = Activation::relu2, .gated = false};
  return spec;
}

LayerSpec muse_spark(LayerSpec spec) {
  spec = with_latent(biased_sigmoid(spec, 1, {}, 1e-15f), 4096);
  spec.latent_input_norm = {.enabled = true, .epsilon = 1e-5f, .weight = true};
  spec.expert_norm = {.enabled = true, .epsilon = 1e-8f, .weight = true, .weight_first = true};
  return spec;
}

LayerSpec longcat(LayerSpec spec, int zero_experts) {
  spec = unnormalised(spec);
  spec.route.experts += zero_experts;
  spec.route.selection_bias = true;
  spec.route.scale = 6;
  spec.zero_experts = zero_experts;
  return spec;
}

std::vector<Model> make_models() {
  const auto& layer = plain_layer;
  constexpr Groups v3_groups = {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2};
  return {
      // name, title, MoE layers, layer(hidden, intermediate, experts, top_k)
      {"mixtral-8x7b", "Mixtral 8x7B", 32, layer(4096, 14336, 8, 2)},
      {"mixtral-8x22b", "Mixtral 8x22B", 56, layer(6144, 16384, 8, 2)},

      {"qwen1.5-moe-a2.7b", "Qwen1.5-MoE-A2.7B", 24,
       with_shared(unnormalised(layer(2048, 1408, 60, 4)), 5632, true)},
      {"qwen2-57b-a14b", "Qwen2-57B-A14B", 28,
       with_shared(unnormalised(layer(3584, 2560, 64, 8)), 20480, true)},
      {"qwen3-30b-a3b", "Qwen3-30B-A3B", 48, layer(2048, 768, 128, 8)},
      {"qwen3-235b-a22b", "Qwen3-235B-A22B", 94, layer(4096, 1536, 128, 8)},
      {"qwen3-coder-480b", "Qwen3-Coder-480B-A35B", 62, layer(6144, 2560, 160, 8)},
      {"qwen3-next-80b-a3b", "Qwen3-Next-80B-A3B", 48,
       with_shared(layer(2048, 512, 512, 10), 512, true)},
      {"qwen3.5-397b-a17b", "Qwen3.5-397B-A17B", 60,
       with_shared(layer(4096, 1024, 512, 10), 1024, true)},

      {"deepseek-v2", "DeepSeek-V2", 59, with_shared(deepseek_v2(layer(5120, 1536, 160, 6)), 3072)},
      {"deepseek-v2-lite", "DeepSeek-V2-Lite", 26,
       with_shared(unnormalised(layer(2048, 1408, 64, 6)), 2816)},
      {"deepseek-v3", "DeepSeek-V3", 58,
       with_shared(biased_sigmoid(layer(7168, 2048, 256, 8), 2.5f, v3_groups), 2048)},
      {"deepseek-v4-flash", "DeepSeek-V4 Flash", 43,
       with_shared(deepseek_v4(layer(4096, 2048, 256, 6), 1.5f), 2048)},
      {"deepseek-v4-pro", "DeepSeek-V4 Pro", 61,
       with_shared(deepseek_v4(layer(7168, 3072, 384, 6), 2.5f), 3072)},
      {"kimi-k2", "Kimi-K2", 60,
       with_shared(biased_sigmoid(layer(7168, 2048, 384, 8), 2.827f), 2048)},
      {"kimi-k3", "Kimi K3", 92, with_shared(kimi_k3(layer(7168, 3072, 896, 16)), 6144)},
      {"glm-4.5", "GLM-4.5", 89,
       with_shared(biased_sigmoid(layer(5120, 1536, 160, 8), 2.5f), 1536)},
      {"glm-4.5-air", "GLM-4.5-Air", 45,
       with_shared(biased_sigmoid(layer(4096, 1408, 128, 8), 1), 1408)},
      {"glm-5", "GLM-5", 75, with_shared(biased_sigmoid(layer(6144, 2048, 256, 8), 2.5f), 2048)},
      {"mimo-v2-flash", "MiMo-V2-Flash", 47, biased_sigmoid(layer(4096, 2048, 256, 8), 1)},
      {"mimo-v2.5-pro", "MiMo-V2.5-Pro", 69, biased_sigmoid(layer(6144, 2048, 384, 8), 1)},
      {"nemotron-3-super", "Nemotron-3 Super", 40,
       with_shared(nemotron_3_super(layer(4096, 2688, 512, 22)), 5376)},
      {"dots-llm1", "dots.llm1", 61,
       with_shared(biased_sigmoid(layer(4096, 1408, 128, 6), 2.5f), 2816)},
      {"minimax-m2", "MiniMax-M2", 62, biased_sigmoid(layer(3072, 1536, 256, 8), 1, {}, 0)},
      {"minimax-m3", "MiniMax-M3", 57,
       with_shared(with_clamped_swiglu(biased_sigmoid(layer(6144, 3072, 128, 4), 2, {}, 0)), 3072)},
      {"minimax-text-01", "MiniMax-Text-01", 80, layer(6144, 9216, 32, 2)},

      {"gpt-oss-20b", "gpt-oss-20b", 24, gpt_oss(layer(2880, 2880, 32, 4))},
      {"gpt-oss-120b", "gpt-oss-120b", 36, gpt_oss(layer(2880, 2880, 128, 4))},
      {"llama-4-scout", "Llama 4 Scout", 48, with_shared(llama4(layer(5120, 8192, 16, 1)), 8192)},
      {"llama-4-maverick", "Llama 4 Maverick", 24,
       with_shared(llama4(layer(5120, 8192, 128, 1)), 8192)},

      {"olmoe-1b-7b", "OLMoE-1B-7B", 16, unnormalised(layer(2048, 1024, 64, 8))},
      {"ernie-4.5-21b-a3b", "ERNIE-4.5-21B-A3B", 27,
       with_shared(ernie(layer(2560, 1536, 64, 6)), 3072)},
      {"ernie-4.5-300b-a47b", "ERNIE-4.5-300B-A47B", 51, ernie(layer(8192, 3584, 64, 8))},
      {"hunyuan-a13b", "Hunyuan-A13B", 32, with_shared(layer(4096, 3072, 64, 8), 3072)},
      {"hunyuan-large", "Hunyuan-Large", 64,
       with_shared(unnormalised(layer(6400, 18304, 16, 1)), 18304)},
      {"granite-3.0-1b-a400m", "Granite-3.0-1B-A400M", 24,
       softmax_of_top_k(layer(1024, 512, 32, 8))},
      {"granite-3.0-3b-a800m", "Granite-3.0-3B-A800M", 32,
       softmax_of_top_k(layer(1536, 512, 40, 8))},
      {"phi-3.5-moe", "Phi-3.5-MoE", 32, phi(layer(4096, 6400, 16, 2))},
      {"lfm2-8b-a1b", "LFM2-8B-A1B", 22, biased_sigmoid(layer(2048, 1792, 32, 4), 1, {}, 1e-6f)},
      {"dbrx", "DBRX", 40, layer(6144, 10752, 16, 4)},
      {"grok-1", "Grok-1", 64, grok(layer(6144, 32768, 8, 2))},
      {"longcat-flash", "LongCat-Flash", 28, longcat(layer(6144, 2048, 512, 12), 256)},
      {"inkling-2", "Inkling 2", 48, with_situ(biased_sigmoid(layer(4608, 2304, 384, 8), 8))},
      {"mistral-large-3", "Mistral Large 3", 58, with_shared(layer(7168, 4096, 128, 4), 4096)},
      {"mistral-large-4", "Mistral Large 4", 71, with_shared(layer(6144, 6144, 128, 4), 6144)},
      {"muse-spark", "Muse Spark", 62, muse_spark(layer(8192, 4096, 256, 8))},
  };
}

std::string folded(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

}  // namespace

const std::vector<Model>& models() {
  static const std::vector<Model> all = make_models();
  return all;
}

const Model* find_model(const std::string& name) {
  for (const auto& model : models()) {
    if (folded(model.name) == folded(name)) return &model;
  }
  return nullptr;
}

}  // namespace shunt::bench
