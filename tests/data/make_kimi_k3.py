#!/usr/bin/env python3
"""Makes the golden checkpoints of Kimi K3, which transformers 5.24 does not have: kimi_k3 (small, the
published names), kimi_k3_real (the published number of experts and choices over tiny matrices) and
kimi_k3_mxfp4 (experts packed as the published checkpoint has them), with the files of make_goldens.py. What an MoE block computes is written here, in f32, by the formulas of the
technical report (arXiv:2607.24653, 2.3 and equations 11 and 12):

  u = W_down x                                     the routed experts' width
  a = sum over the chosen of p_i E_i(u)            p: sigmoid, chosen by p + bias, over their sum
  y = W_up RMSNorm(a) + shared(x)                  the shared experts are one, as wide as the model
  E(u) = W2 ((b tanh(g / b) sigmoid(g)) * (c tanh(v / c))),  g = W1 u, v = W3 u,  b = 4, c = 25

The small one has bounds at which tanh bends numbers of its size.

  pip install torch safetensors
  ./make_kimi_k3.py --out goldens
"""

import argparse
import json
import os
import zlib

import torch
from safetensors.torch import save_file

PREFIX = "language_model.model.layers"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"], "input_activations": None,
        "output_activations": None,
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                    "dynamic": False, "scale_dtype": "torch.uint8"}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
               "re:.*routed_expert_.*_proj", "re:.*block_sparse_moe\\.gate", "re:vision_tower.*"],
    "kv_cache_scheme": None}


def config(hidden, latent, intermediate, experts, top_k, shared, layers, dense, bounds):
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "media_placeholder_token_id": 60, "vision_config": {"patch_size": 14, "vt_hidden_size": 32},
        "text_config": {
            "model_type": "kimi_linear", "hidden_size": hidden, "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers, "first_k_dense_replace": dense, "moe_layer_freq": 1,
            "hidden_act": "situ", "activation_situ_beta": bounds[0], "activation_situ_linear_beta": bounds[1],
            "num_experts": experts, "num_experts_per_token": top_k, "num_shared_experts": shared,
            "moe_intermediate_size": intermediate, "routed_expert_hidden_size": latent,
            "latent_moe_use_norm": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "attn_res_block_size": 12, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "mla_use_nope": True, "mla_use_output_gate": True, "num_attention_heads": 4,
            "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "vocab_size": 64,
            "linear_attn_config": {"full_attn_layers": [layers], "kda_layers": list(range(1, layers)),
                                   "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4,
                                   "gate_lower_bound": -5.0, "use_full_rank_gate": True}}}


def situ_glu(gate, up, bounds):
    return bounds[0] * torch.tanh(gate / bounds[0]) * torch.sigmoid(gate) * bounds[1] * torch.tanh(up / bounds[1])


def block(w, x, text):
    """y, and the router's logits, weights and ids."""
    bounds = (text["activation_situ_beta"], text["activation_situ_linear_beta"])
    logits = x @ w["gate.weight"].T
    p = torch.sigmoid(logits)
    ids = torch.topk(p + w["gate.e_score_correction_bias"], text["num_experts_per_token"], dim=-1).indices
    weights = p.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    u = x @ w["routed_expert_down_proj.weight"].T
    total = torch.zeros_like(u)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t]):
            h = situ_glu(w[f"experts.{e}.w1.weight"] @ u[t], w[f"experts.{e}.w3.weight"] @ u[t], bounds)
            total[t] += weight * (w[f"experts.{e}.w2.weight"] @ h)
    size = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + text["rms_norm_eps"])
    y = (total * size * w["routed_expert_norm.weight"]) @ w["routed_expert_up_proj.weight"].T
    shared = [w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
    return y + situ_glu(x @ shared[0].T, x @ shared[1].T, bounds) @ shared[2].T, (logits, weights, ids)


def make(name, out, tokens, packed=False, **sizes):
    c = config(**sizes)
    text = c["text_config"]
    if packed:
        text["quantization_config"] = MXFP4
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, std=None, mean=0.0):
        std = 1.0 / shape[-1]**0.5 if std is None else std
        return (torch.randn(*shape, generator=generator) * std + mean).bfloat16().float()

    def mxfp4(rows, columns):
        """Codes two to a byte, the even column's low; scales; and what they stand for."""
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        scales = torch.randint(124, 127, (rows, columns // 32), generator=generator)
        values = E2M1[codes] * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
        return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales.to(torch.uint8), values

    hidden, latent, wide = text["hidden_size"], text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    tensors, store = {}, {}
    for layer in range(text["num_hidden_layers"]):
        if layer < text["first_k_dense_replace"]:
            for part, shape in {"gate": (2 * hidden, hidden), "up": (2 * hidden, hidden),
                                "down": (hidden, 2 * hidden)}.items():
                tensors[f"{PREFIX}.{layer}.mlp.{part}_proj.weight"] = normal(*shape).bfloat16()
            continue
        w = {"gate.weight": normal(text["num_experts"], hidden, std=1.5 / hidden**0.5),
             "gate.e_score_correction_bias": normal(text["num_experts"], std=0.15, mean=-0.05),
             "routed_expert_down_proj.weight": normal(latent, hidden),
             "routed_expert_norm.weight": normal(latent, std=0.1, mean=1.0),
             "routed_expert_up_proj.weight": normal(hidden, latent)}
        shared = text["num_shared_experts"] * wide
        for part, shape in {"gate": (shared, hidden), "up": (shared, hidden), "down": (hidden, shared)}.items():
            w[f"shared_experts.{part}_proj.weight"] = normal(*shape)
        for e in range(text["num_experts"]):
            for part, shape in {"w1": (wide, latent), "w2": (latent, wide), "w3": (wide, latent)}.items():
                if packed:
                    codes, scales, w[f"experts.{e}.{part}.weight"] = mxfp4(*shape)
                    tensors[f"{PREFIX}.{layer}.block_sparse_moe.experts.{e}.{part}.weight_packed"] = codes
                    tensors[f"{PREFIX}.{layer}.block_sparse_moe.experts.{e}.{part}.weight_scale"] = scales
                else:
                    w[f"experts.{e}.{part}.weight"] = normal(*shape)
        x = torch.randn(tokens, hidden, generator=generator)
        y, routed = block(w, x, text)
        module = f"{PREFIX}.{layer}.block_sparse_moe"
        store.update({f"{module}.input": x, f"{module}.output": y})
        store.update({f"{module}.gate.gate_out.{i}": part.contiguous() for i, part in enumerate(routed)})
        for key, value in w.items():
            if packed and key.startswith("experts."):
                continue
            tensors[f"{module}.{key}"] = value if "bias" in key else value.bfloat16()
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f, indent=2, sort_keys=True)
        f.write("\n")
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    save_file(store, os.path.join(folder, "golden.safetensors"),
              metadata={"family": "kimi_k3", "seed": str(seed), "torch": torch.__version__})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "goldens"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    make("kimi_k3", args.out, 24, hidden=48, latent=24, intermediate=20, experts=12, top_k=4, shared=2, layers=3,
         dense=1, bounds=(0.75, 1.5))
    make("kimi_k3_real", args.out, 12, hidden=24, latent=16, intermediate=8, experts=896, top_k=16, shared=2,
         layers=1, dense=0, bounds=(4.0, 25.0))
    make("kimi_k3_mxfp4", args.out, 24, packed=True, hidden=48, latent=64, intermediate=32, experts=12, top_k=4,
         shared=2, layers=2, dense=1, bounds=(4.0, 25.0))


if __name__ == "__main__":
    main()
