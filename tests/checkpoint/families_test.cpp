// What published config.json files say, and the specs that they must become.
#include "checkpoint/family.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/model.hpp"
#include "checkpoint/temporary.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt {
namespace {

struct Published {
  const char* name;
  const char* config;  // the fields about experts of the published config.json
  int layer;           // one with experts
  int moe_layers;      // how many there are
  LayerSpec expected;
};

ActivationSpec silu() { return {}; }

LayerSpec layer(std::int64_t hidden, int experts, int top_k, std::int64_t intermediate,
                RouteSpec route, std::int64_t shared = 0) {
  LayerSpec spec;
  spec.hidden = hidden;
  spec.route = route;
  spec.route.experts = experts;
  spec.route.top_k = top_k;
  spec.experts = {
      .experts = experts, .hidden = hidden, .intermediate = intermediate, .activation = silu()};
  spec.shared.intermediate = shared;
  return spec;
}

LayerSpec gated(LayerSpec spec) {
  spec.shared.sigmoid_gate = true;
  return spec;
}

LayerSpec with_activation(LayerSpec spec, ActivationSpec activation, bool biases) {
  spec.experts.activation = activation;
  spec.experts.gate_up_bias = spec.experts.down_bias = biases;
  return spec;
}

RouteSpec softmax(bool renormalize, float scale = 1, Groups groups = {}) {
  return {.score = Score::softmax, .groups = groups, .renormalize = renormalize, .scale = scale};
}

RouteSpec sigmoid_bias(float scale, Groups groups = {}, float epsilon = 1e-20f) {
  return {.score = Score::sigmoid,
          .selection_bias = true,
          .groups = groups,
          .renormalize = true,
          .renormalize_epsilon = epsilon,
          .scale = scale};
}

RouteSpec top_k_softmax() {
  return {.score = Score::softmax, .score_stage = ScoreStage::after_top_k};
}

std::vector<Published> published() {
  const Groups v3_groups = {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2};
  const ActivationSpec oai = {.alpha = 1.702f, .limit = 7, .up_offset = 1};
  RouteSpec gpt_oss = top_k_softmax();
  gpt_oss.router_bias = true;
  RouteSpec llama4 = {.score = Score::sigmoid, .score_stage = ScoreStage::after_top_k};
  llama4.weight_on_input = true;
  RouteSpec ernie = softmax(true);
  ernie.selection_bias = true;
  ernie.epsilon_rule = EpsilonRule::floor;
  ernie.renormalize_epsilon = 1e-12f;
  RouteSpec phi = {.score = Score::sparsemixer, .jitter = 0.01f};
  RouteSpec longcat = softmax(false, 6);
  longcat.selection_bias = true;
  LayerSpec longcat_layer = layer(6144, 768, 12, 2048, longcat);
  longcat_layer.zero_experts = 256;
  longcat_layer.experts.experts = 512;
  LayerSpec longcat_lite = layer(3072, 384, 12, 1024, longcat);
  longcat_lite.zero_experts = 128;
  longcat_lite.experts.experts = 256;
  RouteSpec joint = sigmoid_bias(8, {}, 0);
  joint.shared = {.count = 2, .weight = SharedWeight::joint};
  joint.per_expert_scale = true;
  LayerSpec inkling = layer(6144, 256, 6, 3072, joint);
  inkling.experts.experts = 258;
  RouteSpec v4 = sigmoid_bias(1.5f);
  v4.score = Score::sqrt_softplus;
  LayerSpec v4_layer = with_activation(layer(4096, 256, 6, 2048, v4, 2048), {.limit = 10}, false);
  v4_layer.shared.activation.limit = 10;
  LayerSpec nemotron = with_activation(layer(2688, 128, 6, 1856, sigmoid_bias(2.5f), 3712),
                                       {.kind = Activation::relu2, .gated = false}, false);
  nemotron.shared.activation = nemotron.experts.activation;
  LayerSpec latent = with_activation(layer(4096, 512, 22, 2688, sigmoid_bias(5), 5376),
                                     {.kind = Activation::relu2, .gated = false}, false);
  latent.shared.activation = latent.experts.activation;
  latent.latent = latent.experts.hidden = 1024;
  LayerSpec m3 =
      with_activation(layer(6144, 128, 4, 3072, sigmoid_bias(2, {}, 0), 3072), oai, false);
  m3.shared.activation = oai;
  LayerSpec jet = layer(2048, 8, 2, 5632, top_k_softmax());
  jet.output_bias = true;

  return {
      {"mixtral_8x7b",
       R"({"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 14336, "model_type": "mixtral", "num_experts_per_tok": 2,
           "num_hidden_layers": 32, "num_local_experts": 8, "output_router_logits": false,
           "router_aux_loss_coef": 0.02, "sliding_window": null})",
       31, 32, layer(4096, 8, 2, 14336, softmax(true))},
      {"minimax_text_01",
       R"({"model_type": "minimax", "hidden_act": "silu", "hidden_size": 6144,
           "intermediate_size": 9216, "num_experts_per_tok": 2, "num_hidden_layers": 80,
           "num_local_experts": 32, "mlp_alpha_factor": 3.5565588200778455, "mlp_beta_factor": 1.0,
           "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "router_jitter_noise": 0.0})",
       0, 80, layer(6144, 32, 2, 9216, softmax(true))},
      {"minimax_m1",
       R"({"model_type": "minimax_m1", "hidden_act": "silu", "hidden_size": 6144,
           "intermediate_size": 9216, "num_experts_per_tok": 2, "num_hidden_layers": 80,
           "num_local_experts": 32, "layernorm_mlp_alpha": 3.5565588200778455,
           "layernorm_mlp_beta": 1.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"})",
       0, 80, layer(6144, 32, 2, 9216, softmax(true))},
      // inclusionAI's: transformers does not have them.
      {"ling_lite",
       R"({"model_type": "bailing_moe", "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 5632, "moe_intermediate_size": 1408, "norm_topk_prob": true,
           "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 28,
           "num_shared_experts": 2})",
       0, 28, layer(2048, 64, 6, 1408, softmax(true), 2816)},
      {"ling_mini_2",
       R"({"model_type": "bailing_moe_v2", "first_k_dense_replace": 1, "hidden_act": "silu",
           "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
           "moe_router_enable_expert_bias": true, "moe_shared_expert_intermediate_size": 512,
           "n_group": 8, "norm_topk_prob": true, "num_experts": 256, "num_experts_per_tok": 8,
           "num_hidden_layers": 20, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
           "router_dtype": "fp32", "score_function": "sigmoid", "topk_group": 4})",
       19, 19, layer(2048, 256, 8, 512, sigmoid_bias(2.5f, v3_groups), 512)},
      {"deepseek_moe_16b",
       R"({"model_type": "deepseek", "first_k_dense_replace": 1, "hidden_act": "silu",
           "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
           "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
           "norm_topk_prob": false, "num_experts_per_tok": 6, "num_hidden_layers": 28,
           "scoring_func": "softmax"})",
       1, 27, layer(2048, 64, 6, 1408, softmax(false), 2816)},
      // Its largest has DeepSeek-V3's rule under the name of V2.
      {"deepseek_vl2",
       R"({"model_type": "deepseek_vl_v2", "language_config": {"model_type": "deepseek_v2",
           "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2560,
           "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 1,
           "n_routed_experts": 72, "n_shared_experts": 2, "norm_topk_prob": true,
           "num_experts_per_tok": 6, "num_hidden_layers": 30, "routed_scaling_factor": 2.0,
           "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc"}})",
       1, 29, layer(2560, 72, 6, 1536, sigmoid_bias(2), 3072)},
      {"inkling_published",
       R"({"model_type": "inkling_mm_model", "text_config": {"hidden_size": 6144,
           "num_hidden_layers": 66, "dense_mlp_idx": 2, "dense_intermediate_size": 24576,
           "intermediate_size": 3072, "n_routed_experts": 256, "num_experts_per_tok": 6,
           "n_shared_experts": 2, "route_scale": 8.0, "hidden_act": "silu",
           "gate_activation": "sigmoid", "norm_after_topk": true, "use_global_scale": true,
           "use_gate_bias": true, "shared_expert_sink": true}})",
       2, 64, inkling},
      {"hunyuan_3",
       R"({"model_type": "hy_v3", "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 13312, "moe_intermediate_size": 1536, "expert_hidden_dim": 1536,
           "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
           "num_hidden_layers": 80, "first_k_dense_replace": 1, "route_norm": true,
           "router_scaling_factor": 2.826, "moe_router_use_sigmoid": true,
           "moe_router_enable_expert_bias": true})",
       1, 79, layer(4096, 192, 8, 1536, sigmoid_bias(2.826f), 1536)},
      {"laguna",
       R"({"model_type": "laguna", "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 8192, "moe_intermediate_size": 512,
           "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
           "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
           "decoder_sparse_step": 1, "mlp_only_layers": [0], "moe_routed_scaling_factor": 2.5})",
       1, 2, layer(2048, 256, 8, 512, sigmoid_bias(2.5f, {}, 0), 512)},
      // A dump of a nested model holds the fields of sampling too.
      {"qwen3_omni_with_sampling",
       R"({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {
           "model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "moe_intermediate_size": 768,
           "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
           "num_hidden_layers": 48, "top_k": 50, "top_p": 1.0, "temperature": 1.0}}})",
       0, 48, layer(2048, 128, 8, 768, softmax(true))},
      {"ernie_vl_published",
       R"({"model_type": "ernie4_5_moe_vl", "hidden_act": "silu", "hidden_size": 2560,
           "intermediate_size": 12288, "moe_intermediate_size": [1536, 512],
           "moe_num_experts": [64, 64], "moe_k": 6, "moe_num_shared_experts": 2,
           "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
           "moe_layer_interval": 1, "moe_use_aux_free": true, "moe_norm_min": 1e-12,
           "moe_capacity": [128, 128, 128], "num_hidden_layers": 28, "use_bias": false})",
       1, 27, layer(2560, 64, 6, 1536, ernie, 3072)},
      {"longcat_flash_lite",
       R"({"model_type": "longcat_flash_ngram", "expert_ffn_hidden_size": 1024,
           "hidden_size": 3072, "ffn_hidden_size": 6144, "moe_topk": 12, "n_routed_experts": 256,
           "num_layers": 14, "routed_scaling_factor": 6.0, "zero_expert_num": 128,
           "zero_expert_type": "identity"})",
       0, 14, longcat_lite},
      {"mimo_v2_5",
       R"({"model_type": "mimo_v2", "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 16384, "moe_intermediate_size": 2048, "moe_layer_freq": [0, 1, 1],
           "n_group": 1, "n_routed_experts": 256, "n_shared_experts": null, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 3, "routed_scaling_factor": null,
           "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc"})",
       1, 2, layer(4096, 256, 8, 2048, sigmoid_bias(1))},
      {"qwen15_moe_a27b",
       R"({"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu",
           "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
           "norm_topk_prob": false, "num_experts": 60, "num_experts_per_tok": 4,
           "num_hidden_layers": 24, "shared_expert_intermediate_size": 5632})",
       0, 24, gated(layer(2048, 60, 4, 1408, softmax(false), 5632))},
      {"qwen3_30b_a3b",
       R"({"model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_act": "silu",
           "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
           "moe_intermediate_size": 768, "norm_topk_prob": true, "num_experts": 128,
           "num_experts_per_tok": 8, "num_hidden_layers": 48, "router_aux_loss_coef": 0.001})",
       47, 48, layer(2048, 128, 8, 768, softmax(true))},
      // The class's default when the field is left out.
      {"qwen3_without_norm_topk_prob",
       R"({"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
           "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
           "num_hidden_layers": 48})",
       0, 48, layer(2048, 128, 8, 768, softmax(false))},
      {"qwen3_next_80b_a3b",
       R"({"model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4,
           "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
           "linear_num_key_heads": 16, "mlp_only_layers": [], "moe_intermediate_size": 512,
           "norm_topk_prob": true, "num_experts": 512, "num_experts_per_tok": 10,
           "num_hidden_layers": 48, "shared_expert_intermediate_size": 512})",
       3, 48, gated(layer(2048, 512, 10, 512, softmax(true), 512))},
      {"qwen3_vl_30b_a3b",
       R"({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text",
           "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768,
           "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
           "num_hidden_layers": 48}, "vision_config": {"model_type": "qwen3_vl_moe"}})",
       0, 48, layer(2048, 128, 8, 768, softmax(true))},
      {"qwen35_397b_a17b",
       R"({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text",
           "attn_output_gate": true, "hidden_act": "silu", "hidden_size": 4096,
           "mlp_only_layers": [], "moe_intermediate_size": 1024, "num_experts": 512,
           "num_experts_per_tok": 10, "num_hidden_layers": 60,
           "shared_expert_intermediate_size": 1024}})",
       0, 60, gated(layer(4096, 512, 10, 1024, softmax(true), 1024))},
      {"deepseek_v2",
       R"({"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "ep_size": 1,
           "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120,
           "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_layer_freq": 1,
           "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": false,
           "num_experts_per_tok": 6, "num_hidden_layers": 60, "routed_scaling_factor": 16.0,
           "scoring_func": "softmax", "seq_aux": true, "topk_group": 3,
           "topk_method": "group_limited_greedy"})",
       1, 59,
       layer(5120, 160, 6, 1536,
             softmax(false, 16, {.count = 8, .keep = 3, .rank_by = GroupRank::max}), 3072)},
      {"deepseek_v2_lite",
       R"({"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048,
           "intermediate_size": 10944, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
           "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
           "num_experts_per_tok": 6, "num_hidden_layers": 27, "routed_scaling_factor": 1.0,
           "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy"})",
       26, 26, layer(2048, 64, 6, 1408, softmax(false), 2816)},
      {"deepseek_v3",
       R"({"model_type": "deepseek_v3", "ep_size": 1, "first_k_dense_replace": 3,
           "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
           "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
           "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
           "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
           "topk_method": "noaux_tc", "quantization_config": null})",
       3, 58, layer(7168, 256, 8, 2048, sigmoid_bias(2.5f, v3_groups), 2048)},
      {"kimi_k2",
       R"({"model_type": "kimi_k2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
           "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
           "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
           "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 0,
           "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
           "topk_group": 1, "topk_method": "noaux_tc"})",
       1, 60, layer(7168, 384, 8, 2048, sigmoid_bias(2.827f), 2048)},
      {"kimi_k25",
       R"({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2",
           "first_k_dense_replace": 1, "hidden_size": 7168, "moe_intermediate_size": 2048,
           "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
           "norm_topk_prob": true, "num_experts_per_tok": 8, "num_hidden_layers": 61,
           "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1,
           "topk_method": "noaux_tc"}})",
       1, 60, layer(7168, 384, 8, 2048, sigmoid_bias(2.827f), 2048)},
      {"kimi_linear_48b_a3b",
       R"({"model_type": "kimi_linear", "first_k_dense_replace": 1, "hidden_act": "silu",
           "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
           "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
           "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
           "num_hidden_layers": 27, "num_shared_experts": 1, "routed_scaling_factor": 2.446,
           "topk_group": 1, "use_grouped_topk": true})",
       1, 26, layer(2304, 256, 8, 1024, sigmoid_bias(2.446f), 1024)},
      {"glm_45",
       R"({"model_type": "glm4_moe", "first_k_dense_replace": 3, "hidden_act": "silu",
           "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
           "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_nextn_predict_layers": 1,
           "routed_scaling_factor": 2.5, "topk_group": 1})",
       3, 89, layer(5120, 160, 8, 1536, sigmoid_bias(2.5f), 1536)},
      {"glm_45_air",
       R"({"model_type": "glm4_moe", "first_k_dense_replace": 1, "hidden_size": 4096,
           "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
           "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 46, "routed_scaling_factor": 1.0,
           "topk_group": 1})",
       45, 45, layer(4096, 128, 8, 1408, sigmoid_bias(1), 1408)},
      {"gpt_oss_120b",
       R"({"model_type": "gpt_oss", "experts_per_token": 4, "hidden_act": "silu",
           "hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4,
           "num_hidden_layers": 36, "num_local_experts": 128, "output_router_logits": false,
           "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0})",
       35, 36, with_activation(layer(2880, 128, 4, 2880, gpt_oss), oai, true)},
      {"llama4_maverick",
       R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
           "attn_scale": 0.1, "hidden_act": "silu", "hidden_size": 5120,
           "interleave_moe_layer_step": 2, "intermediate_size": 8192,
           "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_hidden_layers": 48,
           "num_local_experts": 128, "output_router_logits": false, "router_aux_loss_coef": 0.001,
           "router_jitter_noise": 0.0}})",
       1, 24, layer(5120, 128, 1, 8192, llama4, 8192)},
      {"llama4_scout",
       R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
           "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
           "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_hidden_layers": 48,
           "num_local_experts": 16}})",
       0, 48, layer(5120, 16, 1, 8192, llama4, 8192)},
      {"minimax_m2",
       R"({"model_type": "minimax_m2", "attn_type_list": [1], "hidden_act": "silu",
           "hidden_size": 3072, "intermediate_size": 1536, "mtp_transformer_layers": 1,
           "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_local_experts": 256,
           "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
           "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_routing_bias": true})",
       0, 62, layer(3072, 256, 8, 1536, sigmoid_bias(1, {}, 0))},
      {"minimax_m3",
       R"({"model_type": "minimax_m3_vl", "text_config": {"model_type": "minimax_m3_vl_text",
           "dense_intermediate_size": 12288, "hidden_act": "swigluoai", "hidden_size": 6144,
           "intermediate_size": 3072, "moe_layer_freq": [0, 0, 0, 1, 1], "num_experts_per_tok": 4,
           "num_hidden_layers": 5, "num_local_experts": 128, "routed_scaling_factor": 2.0,
           "scoring_func": "sigmoid", "shared_intermediate_size": 3072, "swiglu_alpha": 1.702,
           "swiglu_limit": 7.0, "use_routing_bias": true}})",
       3, 2, m3},
      {"hunyuan_a13b",
       R"({"model_type": "hunyuan_v1_moe", "capacity_factor": 1.0, "group_limited_greedy": false,
           "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 3072, "mlp_bias": false,
           "moe_drop_tokens": false, "moe_intermediate_size": [3072, 3072],
           "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": false,
           "moe_topk": [8, 8], "n_group": false, "norm_topk_prob": true, "num_experts": 64,
           "num_hidden_layers": 2, "num_shared_expert": [1, 1], "routed_scaling_factor": false,
           "topk_group": false, "use_mixed_mlp_moe": true})",
       1, 2, layer(4096, 64, 8, 3072, softmax(true), 3072)},
      {"ernie_45_21b_a3b",
       R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560,
           "intermediate_size": 12288, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
           "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_interval": 1,
           "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
           "moe_use_aux_free": true, "num_hidden_layers": 28, "use_bias": false})",
       1, 27, layer(2560, 64, 6, 1536, ernie, 3072)},
      {"ernie_45_300b_a47b",
       R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 8192,
           "intermediate_size": 28672, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
           "moe_intermediate_size": 3584, "moe_k": 8, "moe_layer_interval": 1,
           "moe_layer_start_index": 3, "moe_layer_end_index": 53, "moe_num_experts": 64,
           "moe_num_shared_experts": 0, "moe_use_aux_free": true, "num_hidden_layers": 54,
           "use_bias": false})",
       3, 51, layer(8192, 64, 8, 3584, ernie)},
      {"dots_llm1",
       R"({"model_type": "dots1", "first_k_dense_replace": 1, "hidden_act": "silu",
           "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
           "moe_layer_freq": 1, "n_routed_experts": 128, "n_shared_experts": 2,
           "norm_topk_prob": true, "num_experts_per_tok": 6, "num_hidden_layers": 62,
           "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "n_group": 1,
           "topk_group": 1, "topk_method": "noaux_tc"})",
       1, 61, layer(4096, 128, 6, 1408, sigmoid_bias(2.5f), 2816)},
      {"mimo_v2_flash",
       R"({"model_type": "mimo_v2_flash", "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 16384, "moe_intermediate_size": 2048,
           "moe_layer_freq": [0, 1, 1], "n_group": 1, "n_routed_experts": 256,
           "n_shared_experts": null, "norm_topk_prob": true, "num_experts_per_tok": 8,
           "num_hidden_layers": 3, "routed_scaling_factor": null, "scoring_func": "sigmoid",
           "topk_group": 1, "topk_method": "noaux_tc"})",
       1, 2, layer(4096, 256, 8, 2048, sigmoid_bias(1))},
      {"olmoe_1b_7b",
       R"({"model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 1024, "norm_topk_prob": false, "num_experts": 64,
           "num_experts_per_tok": 8, "num_hidden_layers": 16, "router_aux_loss_coef": 0.01})",
       0, 16, layer(2048, 64, 8, 1024, softmax(false))},
      {"phi_35_moe",
       R"({"model_type": "phimoe", "hidden_act": "silu", "hidden_size": 4096,
           "input_jitter_noise": 0.01, "intermediate_size": 6400, "num_experts_per_tok": 2,
           "num_hidden_layers": 32, "num_local_experts": 16, "output_router_logits": false,
           "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01})",
       0, 32, layer(4096, 16, 2, 6400, phi)},
      {"granite_30_3b_a800m",
       R"({"model_type": "granitemoe", "hidden_act": "silu", "hidden_size": 1536,
           "intermediate_size": 512, "num_experts_per_tok": 8, "num_hidden_layers": 32,
           "num_local_experts": 40, "residual_multiplier": 0.22, "router_aux_loss_coef": 0.001})",
       0, 32, layer(1536, 40, 8, 512, top_k_softmax())},
      {"granite_40_h_small",
       R"({"model_type": "granitemoehybrid", "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 768, "layer_types": ["mamba"], "mamba_n_groups": 1,
           "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_local_experts": 72,
           "shared_intermediate_size": 1536})",
       0, 40, layer(4096, 72, 10, 768, top_k_softmax())},
      {"lfm2_8b_a1b",
       R"({"model_type": "lfm2_moe", "conv_L_cache": 3, "hidden_size": 2048,
           "intermediate_size": 7168, "moe_intermediate_size": 1792, "norm_topk_prob": true,
           "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
           "num_hidden_layers": 24, "routed_scaling_factor": 1.0, "use_expert_bias": true})",
       2, 22, layer(2048, 32, 4, 1792, sigmoid_bias(1, {}, 1e-6f))},
      {"trinity_mini",
       R"({"model_type": "afmoe", "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 6144, "load_balance_coeff": 0.001, "moe_intermediate_size": 1024,
           "n_group": 1, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
           "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_limited_groups": 1,
           "num_shared_experts": 1, "route_norm": true, "route_scale": 2.826,
           "score_func": "sigmoid", "topk_group": 1, "use_grouped_mm": true})",
       2, 30, layer(2048, 128, 8, 1024, sigmoid_bias(2.826f), 1024)},
      {"jamba_mini",
       R"({"model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8,
           "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
           "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_state": 16,
           "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
           "router_aux_loss_coef": 0.001})",
       1, 16, layer(4096, 16, 2, 14336, softmax(false))},
      {"dbrx",
       R"({"model_type": "dbrx", "attn_config": {"clip_qkv": 8}, "d_model": 6144, "n_layers": 40,
           "ffn_config": {"ffn_hidden_size": 10752, "moe_jitter_eps": 0.01,
           "moe_loss_weight": 0.05, "moe_num_experts": 16, "moe_top_k": 4}})",
       0, 40, layer(6144, 16, 4, 10752, softmax(true))},
      {"longcat_flash",
       R"({"model_type": "longcat_flash", "attention_method": "MLA",
           "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "hidden_size": 6144,
           "moe_topk": 12, "n_routed_experts": 512, "norm_topk_prob": false, "num_layers": 28,
           "routed_scaling_factor": 6.0, "router_bias": false, "zero_expert_num": 256,
           "zero_expert_type": "identity"})",
       0, 28, longcat_layer},
      {"nemotron_3_nano",
       R"({"model_type": "nemotron_h", "hidden_size": 2688,
           "hybrid_override_pattern": "MEMEM*E-", "intermediate_size": 1856, "mamba_num_heads": 64,
           "mlp_bias": false, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
           "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
           "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 6, "num_hidden_layers": 8, "routed_scaling_factor": 2.5,
           "topk_group": 1})",
       1, 3, nemotron},
      {"nemotron_3_super",
       R"({"model_type": "nemotron_h", "hidden_size": 4096, "layers_block_type": ["mamba", "moe"],
           "mlp_hidden_act": "relu2", "moe_intermediate_size": 2688, "moe_latent_size": 1024,
           "moe_shared_expert_intermediate_size": 5376, "moe_shared_expert_overlap": false,
           "n_group": 1, "n_routed_experts": 512, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 22, "routed_scaling_factor": 5.0, "topk_group": 1})",
       1, 1, latent},
      {"deepseek_v4_flash_bf16",
       R"({"model_type": "deepseek_v4", "hidden_act": "silu", "hidden_size": 4096, "hc_mult": 4,
           "index_topk": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256,
           "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 6,
           "num_hash_layers": 3, "num_hidden_layers": 43, "routed_scaling_factor": 1.5,
           "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "topk_method": "noaux_tc"})",
       3, 43, v4_layer},
      {"jetmoe_8b",
       R"({"model_type": "jetmoe", "activation_function": "silu", "hidden_size": 2048,
           "intermediate_size": 5632, "num_experts_per_tok": 2, "num_hidden_layers": 24,
           "num_local_experts": 8})",
       0, 24, jet},
  };
}

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

INSTANTIATE_TEST_SUITE_P(Families, PublishedConfigs, testing::ValuesIn(published()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Families, HashLayersOfDeepSeekV4) {
  for (const Published& p : published()) {
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
      {"gpt_oss_120b", "swiglu_limit", "10.0", "swiglu_limit is 10.0"},
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
  };
  const std::vector<Published> all = published();
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

TEST(Families, TheTableHasEachOnceAndKnowsThemAll) {
  std::set<std::string_view> types;
  for (const Family& family : family_table()) EXPECT_TRUE(types.insert(family.type).second);
  for (const Refusal& refusal : refusal_table()) EXPECT_TRUE(types.insert(refusal.type).second);
  const std::vector<std::string> known = known_families();
  EXPECT_EQ(known.size(), family_table().size());
  EXPECT_TRUE(std::is_sorted(known.begin(), known.end()));
}

}  // namespace
}  // namespace shunt
