"""The model families of make_goldens.py: how small each is made, and what its real counts are."""

import json
import os
import re
from dataclasses import dataclass, field

import transformers

# Came with the project, made by the same rules; never overwritten.
GIVEN = {"deepseek_v2", "deepseek_v3", "deepseek_v3_e256", "gpt_oss", "llama4", "llama4_e128",
         "mixtral", "qwen2_moe", "qwen3_moe"}

# Families that have experts and no golden, and why.
REFUSED = {
    "doge": "experts are single vectors found by product keys: no grouped matrix product",
    "zaya": "the router is a network that reads the previous layer's router state",
    "switch_transformers": "capacity: a token's result depends on the batch's other tokens",
    "nllb_moe": "capacity: a token's result depends on the batch's other tokens",
}


@dataclass
class Family:
    name: str
    model: str
    config_class: str
    small: dict
    real: dict | None = None
    nest: tuple = ()  # where the text model's fields live in the root config
    root: dict = field(default_factory=dict)
    one_naming: bool = False  # published and merged names are the same
    only: str = ""  # blocks to keep
    rename: object = None  # folder -> names, after saving in published names
    shards: str | None = None  # max_shard_size of the small variant

    @property
    def variants(self):
        return ("small", "real") if self.real is not None else ("small",)

    def config(self, variant):
        fields = dict(self.small if variant == "small" else {**self.small, **self.real})
        for key in reversed(self.nest):
            fields = {key: fields}
        for key, value in self.root.items():
            fields.setdefault(key, value)
        return getattr(transformers, self.config_class)(**fields)

    def model_class(self):
        """Classes that transformers does not export at its top."""
        module = __import__(f"transformers.models.{self.name}.modeling_{self.name}",
                            fromlist=[self.model])
        return getattr(module, self.model)

    def hidden(self, config):
        for key in self.nest:
            config = getattr(config, key)
        return config.hidden_size

    def shard(self, variant):
        return self.shards if variant == "small" else None


def lm(layers=2, hidden=48, **fields):
    """A text model: fields that every family has, then its own."""
    return dict(hidden_size=hidden, num_hidden_layers=layers, vocab_size=64,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                bos_token_id=0, eos_token_id=0, pad_token_id=0, **fields)


def tiny(**fields):
    return dict(hidden_size=24, **fields)


# DeepSeek's latent attention.
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
FAMILIES = []


def family(*args, **kwargs):
    FAMILIES.append(Family(*args, **kwargs))


def rename_tensors(pattern, replacement, **config):
    """Rewrites tensor names, and fields of config.json, of a saved folder."""

    def apply(folder):
        from safetensors.torch import load_file, save_file
        path = os.path.join(folder, "model.safetensors")
        tensors = {re.sub(pattern, replacement, k): v for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        if config:
            path = os.path.join(folder, "config.json")
            with open(path) as f:
                fields = json.load(f)
            fields.update(config)
            with open(path, "w") as f:
                json.dump(fields, f, indent=2, sort_keys=True)
                f.write("\n")
        return sorted(tensors)

    return apply


# --- softmax ---------------------------------------------------------------------------------
family("mixtral", "MixtralForCausalLM", "MixtralConfig",
       lm(num_local_experts=6, num_experts_per_tok=2, intermediate_size=20))
family("minimax", "MiniMaxForCausalLM", "MiniMaxConfig",
       lm(num_local_experts=6, num_experts_per_tok=2, intermediate_size=21, head_dim=12,
          mlp_beta_factor=3.5),
       tiny(num_hidden_layers=1, num_local_experts=32, intermediate_size=8))
family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
       lm(3, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          shared_expert_intermediate_size=28, decoder_sparse_step=2, mlp_only_layers=[]),
       tiny(num_hidden_layers=1, decoder_sparse_step=1, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=8, shared_expert_intermediate_size=32))
family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
       lm(3, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=20, intermediate_size=64,
          mlp_only_layers=[1], norm_topk_prob=True, head_dim=12),
       tiny(num_hidden_layers=1, mlp_only_layers=[], num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=8), shards="24KB")
family("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig",
       lm(2, num_experts=12, num_experts_per_tok=5, moe_intermediate_size=20, head_dim=12,
          shared_expert_intermediate_size=20, mlp_only_layers=[0], intermediate_size=64),
       tiny(num_hidden_layers=1, mlp_only_layers=[], num_experts=512, num_experts_per_tok=10,
            moe_intermediate_size=8, shared_expert_intermediate_size=8))
family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12,
          intermediate_size=64),
       tiny(num_hidden_layers=1, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=8),
       nest=("text_config",))
family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12,
          shared_expert_intermediate_size=20),
       tiny(num_hidden_layers=1, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=8,
            shared_expert_intermediate_size=8), nest=("text_config",))
family("qwen4_exp", "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
       lm(1, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12,
          shared_expert_intermediate_size=20, layer_types=["linear_attention"], hc_lowrank=8,
          ngram_vocab_size_base=64, split_ngram_parts=1),
       tiny(num_hidden_layers=1, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=8,
            shared_expert_intermediate_size=8))
family("qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12,
          intermediate_size=64),
       tiny(num_hidden_layers=1, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=8),
       nest=("text_config",))
family("mellum", "MellumForCausalLM", "MellumConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12,
          intermediate_size=64, mlp_layer_types=["dense", "sparse"]),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_experts=64, num_experts_per_tok=8,
            moe_intermediate_size=8))
family("olmoe", "OlmoeForCausalLM", "OlmoeConfig",
       lm(num_experts=12, num_experts_per_tok=4, intermediate_size=20),
       tiny(num_hidden_layers=1, num_experts=64, num_experts_per_tok=8, intermediate_size=8))
family("flex_olmo", "FlexOlmoForCausalLM", "FlexOlmoConfig",
       lm(num_experts=7, num_experts_per_tok=5, intermediate_size=21, norm_topk_prob=True))
family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, first_k_dense_replace=1, n_group=3,
          topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=160,
            num_experts_per_tok=6, n_group=8, topk_group=3, moe_intermediate_size=8))
family("deepseek_v2_lite", "DeepseekV2ForCausalLM", "DeepseekV2Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, first_k_dense_replace=1, n_group=1,
          topk_group=1, topk_method="greedy", **{**MLA, "q_lora_rank": None}),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=64,
            num_experts_per_tok=6, moe_intermediate_size=8))
family("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", "DeepseekOcr2Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, mlp_layer_types=["dense", "sparse"]),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=64,
            num_experts_per_tok=6, moe_intermediate_size=8), nest=("text_config",))
family("mistral4", "Mistral4ForCausalLM", "Mistral4Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=1, first_k_dense_replace=1, n_group=3,
          topk_group=2, head_dim=12, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=4, n_group=1, topk_group=1, moe_intermediate_size=8))
family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config",
       lm(2, num_experts=12, moe_topk=[3, 3], intermediate_size=20, head_dim=12),
       tiny(num_hidden_layers=1, num_experts=64, moe_topk=8, intermediate_size=8))
family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
       lm(3, moe_num_experts=12, moe_k=4, moe_intermediate_size=20, intermediate_size=64,
          moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=2,
          moe_layer_interval=1),
       tiny(num_hidden_layers=2, moe_layer_end_index=-1, moe_num_experts=64, moe_k=6,
            moe_intermediate_size=8))
family("ernie4_5_moe_a47b", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
       lm(2, hidden=24, moe_num_experts=64, moe_k=8, moe_intermediate_size=8, intermediate_size=64,
          moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_end_index=-1,
          moe_layer_interval=1))
family("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeConfig",
       lm(2, moe_num_experts=12, moe_k=4, moe_intermediate_size=[20, 12], intermediate_size=64,
          moe_num_shared_experts=2, head_dim=128),
       tiny(num_hidden_layers=2, moe_num_experts=64, moe_k=6, moe_intermediate_size=[8, 4]),
       nest=("text_config",))
family("jamba", "JambaForCausalLM", "JambaConfig",
       lm(3, num_experts=6, num_experts_per_tok=2, intermediate_size=20, expert_layer_period=2,
          expert_layer_offset=1),
       tiny(num_hidden_layers=2, num_experts=16, intermediate_size=8))
family("dbrx", "DbrxForCausalLM", "DbrxConfig",
       dict(d_model=48, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=64,
            attn_config=dict(kv_n_heads=2, rope_theta=10000.0),
            ffn_config=dict(moe_num_experts=6, moe_top_k=3, ffn_hidden_size=20,
                            moe_jitter_eps=0.01, moe_normalize_expert_weights=1.0)),
       dict(d_model=24, n_layers=1,
            ffn_config=dict(moe_num_experts=16, moe_top_k=4, ffn_hidden_size=8,
                            moe_normalize_expert_weights=1.0)), one_naming=True)
family("longcat_flash", "LongcatFlashForCausalLM", "LongcatFlashConfig",
       dict(hidden_size=48, num_layers=2, num_hidden_layers=4, vocab_size=64, num_attention_heads=4,
            num_key_value_heads=4, n_routed_experts=10, zero_expert_num=4, moe_topk=4,
            expert_ffn_hidden_size=20, ffn_hidden_size=64, routed_scaling_factor=6.0,
            head_dim=8, **MLA),
       tiny(num_layers=1, num_hidden_layers=2, n_routed_experts=512, zero_expert_num=256,
            moe_topk=12, expert_ffn_hidden_size=8))

# --- the top-k logits, then softmax ------------------------------------------------------------
family("gpt_oss", "GptOssForCausalLM", "GptOssConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20, head_dim=12),
       tiny(num_hidden_layers=1, num_local_experts=128, intermediate_size=8), one_naming=True)
family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification",
       "OpenAIPrivacyFilterConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20, head_dim=12),
       tiny(num_hidden_layers=1, num_local_experts=128, intermediate_size=8), one_naming=True)
family("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20),
       tiny(num_hidden_layers=1, num_local_experts=40, num_experts_per_tok=8, intermediate_size=8))
family("granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20,
          shared_intermediate_size=28),
       tiny(num_hidden_layers=1, num_local_experts=32, num_experts_per_tok=8, intermediate_size=8))
family("granitemoehybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20,
          shared_intermediate_size=28, mamba_n_heads=4),
       tiny(num_hidden_layers=1, num_local_experts=72, num_experts_per_tok=10,
            intermediate_size=8))
family("granitemoe_swa", "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig",
       lm(num_local_experts=12, num_experts_per_tok=4, intermediate_size=20,
          shared_intermediate_size=28), one_naming=True)
family("jetmoe", "JetMoeForCausalLM", "JetMoeConfig",
       dict(hidden_size=48, num_hidden_layers=2, vocab_size=64, num_key_value_heads=2,
            kv_channels=12, intermediate_size=20, num_local_experts=8, num_experts_per_tok=2),
       one_naming=True)
family("aria", "AriaForConditionalGeneration", "AriaConfig",
       lm(moe_num_experts=12, moe_topk=3, intermediate_size=20,
          moe_num_shared_experts=2, model_type="aria_text"),
       tiny(num_hidden_layers=1, moe_num_experts=64, moe_topk=6, intermediate_size=8),
       nest=("text_config",), only="language_model",
       root=dict(vision_config=dict(model_type="idefics3_vision", hidden_size=32,
                                    num_hidden_layers=1, num_attention_heads=4)))
family("cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeConfig",
       lm(3, num_experts=12, num_experts_per_tok=4, intermediate_size=20, num_shared_experts=1,
          prefix_dense_intermediate_size=64, mlp_layer_types=["dense", "sparse", "sparse"],
          expert_selection_fn="sigmoid", head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_experts=128,
            num_experts_per_tok=8, intermediate_size=8, num_shared_experts=0,
            expert_selection_fn="softmax"))
family("gemma4", "Gemma4ForConditionalGeneration", "Gemma4Config",
       lm(2, num_experts=12, top_k_experts=4, moe_intermediate_size=20, intermediate_size=64,
          enable_moe_block=True, head_dim=12, hidden_size_per_layer_input=0),
       tiny(num_hidden_layers=1, num_experts=128, top_k_experts=8, moe_intermediate_size=8),
       nest=("text_config",), one_naming=True)

# --- sigmoid -----------------------------------------------------------------------------------
family("llama4", "Llama4ForConditionalGeneration", "Llama4Config",
       lm(4, num_local_experts=6, num_experts_per_tok=1, intermediate_size=20,
          intermediate_size_mlp=64, interleave_moe_layer_step=2, head_dim=12),
       nest=("text_config",), one_naming=True)
V3 = dict(n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=1)
family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
       lm(2, first_k_dense_replace=1, n_group=3, topk_group=2, **V3, **MLA))
family("kimi_k2", "DeepseekV3ForCausalLM", "DeepseekV3Config",
       lm(2, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.827, **V3,
          **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=384,
            num_experts_per_tok=8, moe_intermediate_size=8),
       one_naming=True, rename=rename_tensors("$^", "", model_type="kimi_k2"))
family("kimi_k25", "Kimi_K25ForConditionalGeneration", "Kimi_K25Config",
       lm(2, model_type="deepseek_v3", first_k_dense_replace=1, n_group=1, topk_group=1,
          routed_scaling_factor=2.827, **V3, **MLA), nest=("text_config",),
       # Reversing its vision renames also hits the text model: published names have 'layers'.
       rename=rename_tensors(r"\.model\.blocks\.", ".model.layers."))
family("deepseek_v32", "DeepseekV32ForCausalLM", "DeepseekV32Config",
       lm(2, mlp_layer_types=["dense", "sparse"], n_group=3, topk_group=2, **V3, **MLA),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=256,
            num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=8))
family("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig",
       lm(2, first_k_dense_replace=1, routed_scaling_factor=2.5, head_dim=12, **V3),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=160,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("glm4v_moe", "Glm4vMoeForConditionalGeneration", "Glm4vMoeConfig",
       lm(2, first_k_dense_replace=1, head_dim=12, **V3),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=8), nest=("text_config",))
family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig",
       lm(2, mlp_layer_types=["dense", "sparse"], **V3, **MLA),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=64,
            num_experts_per_tok=4, moe_intermediate_size=8))
family("glm_moe_dsa", "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig",
       lm(2, first_k_dense_replace=1, **V3, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("glm5_next", "Glm5NextForConditionalGeneration", "Glm5NextConfig",
       lm(2, mlp_layer_types=["dense", "sparse"], swiglu_limit=0.75, **V3)
       | dict(num_key_value_heads=4),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=288,
            num_experts_per_tok=8, moe_intermediate_size=8), nest=("text_config",))
family("solar_open", "SolarOpenForCausalLM", "SolarOpenConfig",
       lm(2, head_dim=12, **{k: v for k, v in V3.items() if k != "intermediate_size"}),
       tiny(num_hidden_layers=1, n_routed_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=8))
family("axk1", "AXK1ForCausalLM", "AXK1Config",
       lm(2, first_k_dense_replace=1, n_group=3, topk_group=2, **V3, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=192,
            num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=8))
family("axk2", "AXK2ForCausalLM", "AXK2Config",
       lm(2, mlp_layer_types=["dense", "sparse"], **V3, **MLA),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("dots1", "Dots1ForCausalLM", "Dots1Config",
       lm(2, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
          routed_scaling_factor=2.5, head_dim=12, **{**V3, "n_shared_experts": 2}),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=6, moe_intermediate_size=8))
family("mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
       lm(2, mlp_layer_types=["dense", "sparse"], head_dim=12,
          **{k: v for k, v in V3.items() if k != "n_shared_experts"}),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("exaone_moe", "ExaoneMoeForCausalLM", "ExaoneMoeConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          num_shared_experts=1, first_k_dense_replace=1, head_dim=12),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=8))
family("kimi_linear", "KimiLinearForCausalLM", "KimiLinearConfig",
       lm(2, num_local_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=1, mlp_layer_types=["dense", "sparse"]),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_local_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("hy_v3", "HYV3ForCausalLM", "HYV3Config",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          num_shared_experts=1, head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_experts=192,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("hy_v4", "HYV4ForCausalLM", "HYV4Config",
       lm(2, swiglu_limit=0.75, mlp_layer_types=["dense", "sparse"], **V3),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config",
       lm(2, num_local_experts=12, num_experts_per_tok=4, intermediate_size=20, head_dim=12),
       tiny(num_hidden_layers=1, num_local_experts=256, num_experts_per_tok=8,
            intermediate_size=8))
family("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig",
       lm(2, num_local_experts=12, num_experts_per_tok=4, intermediate_size=20, head_dim=12,
          dense_intermediate_size=64, shared_intermediate_size=24, swiglu_limit=1.5,
          mlp_layer_types=["dense", "sparse"], layer_types=["full_attention"] * 2),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], layer_types=["full_attention"],
            num_local_experts=128, intermediate_size=8, shared_intermediate_size=8),
       nest=("text_config",))
family("lfm2_moe", "Lfm2MoeForCausalLM", "Lfm2MoeConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          num_dense_layers=1, layer_types=["conv", "full_attention"]),
       tiny(num_hidden_layers=1, num_dense_layers=0, layer_types=["conv"], num_experts=32,
            moe_intermediate_size=8))
family("afmoe", "AfmoeForCausalLM", "AfmoeConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          num_dense_layers=1, num_shared_experts=1, route_scale=2.826, head_dim=12),
       tiny(num_hidden_layers=1, num_dense_layers=0, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=8))
family("laguna", "LagunaForCausalLM", "LagunaConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20, intermediate_size=64,
          shared_expert_intermediate_size=24, moe_routed_scaling_factor=2.5,
          moe_router_logit_softcapping=1.5, head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8, shared_expert_intermediate_size=8,
            moe_router_logit_softcapping=0.0))
family("step3p7", "Step3p7ForConditionalGeneration", "Step3p7Config",
       lm(3, n_routed_experts=12, num_local_experts=12, num_experts_per_tok=4,
          moe_intermediate_size=20, intermediate_size=64, share_expert_dim=24,
          moe_router_scaling_factor=3.0, mlp_layer_types=["dense", "sparse", "sparse"],
          swiglu_limits=[0, 0, 0.5], swiglu_limits_shared=[0, 0.75, 0], head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=288,
            num_local_experts=288, num_experts_per_tok=8, moe_intermediate_size=8,
            share_expert_dim=8, swiglu_limits=None, swiglu_limits_shared=None),
       nest=("text_config",))
family("nemotron_h", "NemotronHForCausalLM", "NemotronHConfig",
       lm(3, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          moe_shared_expert_intermediate_size=28, intermediate_size=64, routed_scaling_factor=2.5,
          layers_block_type=["mlp", "moe", "moe"], head_dim=12),
       tiny(num_hidden_layers=1, layers_block_type=["moe"], n_routed_experts=128,
            num_experts_per_tok=6, moe_intermediate_size=8, moe_shared_expert_intermediate_size=16))
family("nemotron_h_latent", "NemotronHForCausalLM", "NemotronHConfig",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          moe_shared_expert_intermediate_size=28, intermediate_size=64, routed_scaling_factor=2.5,
          layers_block_type=["mlp", "moe"], moe_latent_size=24, head_dim=12),
       tiny(num_hidden_layers=1, layers_block_type=["moe"], n_routed_experts=512,
            num_experts_per_tok=22, moe_intermediate_size=8, moe_latent_size=16,
            moe_shared_expert_intermediate_size=16))
family("inkling", "InklingForConditionalGeneration", "InklingConfig",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, mlp_layer_types=["dense", "sparse"],
          layer_types=["hybrid_sliding", "hybrid"], head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], layer_types=["hybrid"],
            n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=8),
       nest=("text_config",))

# --- others ------------------------------------------------------------------------------------
family("deepseek_v4", "DeepseekV4ForCausalLM", "DeepseekV4Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          n_shared_experts=1, mlp_layer_types=["hash_moe", "moe"], swiglu_limit=0.75,
          layer_types=["sliding_attention"] * 2),
       tiny(num_hidden_layers=1, mlp_layer_types=["moe"], n_routed_experts=384,
            num_experts_per_tok=6, moe_intermediate_size=8, layer_types=["sliding_attention"]))
family("phimoe", "PhimoeForCausalLM", "PhimoeConfig",
       lm(num_local_experts=6, num_experts_per_tok=2, intermediate_size=20,
          router_jitter_noise=0.1),
       tiny(num_hidden_layers=1, num_local_experts=16, intermediate_size=8,
            router_jitter_noise=0.01))

# --- families of transformers 5.24 ---------------------------------------------------------------
family("lara_mini", "LaraMiniForCausalLM", "LaraMiniConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          shared_expert_intermediate_size=28, head_dim=12),
       tiny(num_hidden_layers=1, num_experts=128, moe_intermediate_size=8,
            shared_expert_intermediate_size=8))
family("mistral_large4", "MistralLarge4ForConditionalGeneration", "MistralLarge4Config",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, n_group=3, topk_group=2,
          routed_scaling_factor=1.5, **{k: v for k, v in MLA.items() if k != "q_lora_rank"}),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=4, moe_intermediate_size=8, n_group=1, topk_group=1),
       nest=("text_config",))
family("unlimited_ocr", "UnlimitedOcrForConditionalGeneration", "UnlimitedOcrConfig",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=2, mlp_layer_types=["dense", "sparse"]),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=64,
            num_experts_per_tok=6, moe_intermediate_size=8), nest=("text_config",))
family("beam", "BeamForCausalLM", "BeamConfig",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_group=3, topk_group=2, mlp_layer_types=["dense", "sparse"],
          head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_experts=256,
            num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=8))
family("sarvam_moe", "Glm4MoeForCausalLM", "SarvamMoEConfig",
       lm(2, first_k_dense_replace=1, n_group=3, topk_group=2, head_dim=12, **V3),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=6, n_group=1, topk_group=1, moe_intermediate_size=8))
family("sarvam_mla", "DeepseekV3ForCausalLM", "SarvamMLAConfig",
       lm(2, first_k_dense_replace=1, **V3, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=8))
family("dots3_note", "Dots3NoteForCausalLM", "Dots3NoteTextConfig",
       {**lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
             intermediate_size=64, n_shared_experts=2, shared_experts_intermediate_size=12,
             n_group=3, topk_group=2, routed_scaling_factor=2.5, **MLA), "num_key_value_heads": 4},
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8, n_shared_experts=1, n_group=1,
            topk_group=1))
family("bailing_hybrid", "BailingHybridForCausalLM", "BailingHybridConfig",
       lm(2, num_local_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, n_shared_experts=1, n_group=3, topk_group=2,
          first_k_dense_replace=1, head_dim=12, **MLA),
       tiny(num_hidden_layers=1, first_k_dense_replace=0, num_local_experts=512,
            num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=8))
family("hy_v4_vl", "HYV4VLForConditionalGeneration", "HYV4VLConfig",
       lm(2, swiglu_limit=0.75, mlp_layer_types=["dense", "sparse"], **V3),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], n_routed_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8), nest=("text_config",))
# Bounds at which tanh bends numbers of this size.
family("inkling2", "Inkling2ForCausalLM", "Inkling2TextConfig",
       lm(2, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          mlp_gate_softcap=0.75, mlp_up_softcap=1.5,
          layer_types=["hybrid_sliding", "hybrid"], head_dim=12),
       tiny(num_hidden_layers=1, layer_types=["hybrid"], n_routed_experts=384,
            num_experts_per_tok=8, moe_intermediate_size=8, mlp_gate_softcap=4.0,
            mlp_up_softcap=25.0))
family("inkling2_loop", "Inkling2LoopForCausalLM", "Inkling2LoopTextConfig",
       lm(3, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          mlp_gate_softcap=0.75, mlp_up_softcap=1.5, n_layers_per_attn_res_block=1,
          loop_layer_index_start=1, loop_layer_index_end=2, loop_num_passes=2, loop_gate_rank=8,
          layer_types=["hybrid_sliding", "hybrid", "hybrid"], head_dim=12))
family("flint", "FlintForCausalLM", "FlintConfig",
       lm(3, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          intermediate_size=64, shared_expert_intermediate_size=28, head_dim=12),
       tiny(num_hidden_layers=1, mlp_only_layers=[], num_experts=256, num_experts_per_tok=6,
            moe_intermediate_size=8, shared_expert_intermediate_size=16))
family("kolibri1", "Kolibri1ForCausalLM", "Kolibri1Config",
       lm(2, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          shared_expert_intermediate_size=28, head_dim=12),
       tiny(num_hidden_layers=1, num_experts=384, num_experts_per_tok=6,
            moe_intermediate_size=8, shared_expert_intermediate_size=8))
family("muse_spark", "MuseSparkTextModel", "MuseSparkTextConfig",
       lm(2, num_local_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
          moe_hidden_size=24, intermediate_size=64, routed_scaling_factor=1.5,
          mlp_layer_types=["dense", "sparse"], head_dim=12),
       tiny(num_hidden_layers=1, mlp_layer_types=["sparse"], num_local_experts=256,
            num_experts_per_tok=8, moe_intermediate_size=8, moe_hidden_size=16), one_naming=True)
