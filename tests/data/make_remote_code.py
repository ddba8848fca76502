#!/usr/bin/env python3
"""Makes the golden checkpoints of families whose code is their publishers' and not in transformers
(src/checkpoint/families/remote_code.cpp), with the files of make_goldens.py. What an MoE block
computes is written here, in double, by the formulas of

  grok1       xai-org/grok-1 model.py; tensors as hpcai-tech/grok-1 has them: vLLM's grok1.py
                p = softmax(l), w = p, E(x) = linear_1 (gelu(linear x) * linear_v x)
  grok2       SGLang's models/grok.py, vLLM's grok1.py
                l = c tanh(l / c), w = p, y = (sum of w E(x) + mlp(x)) / sqrt(2)
  arctic      Snowflake's modeling_arctic.py, vLLM's arctic.py
                w = p / sum p; its residual_mlp has another input and is not of the block
  minicpm_moe vLLM's minicpm.py: w = p / sum p
  xverse_moe  XVERSE's modeling_xverse.py: w = p / (sum p + 1e-6), and shared experts as one

Grok's GELU is that of xAI's model.py, JAX's by tanh; engines have erf in places. Small ones have a
soft cap at which tanh bends numbers of their size;
real ones the published counts of experts over tiny matrices.

  pip install numpy
  ./make_remote_code.py --out goldens
"""

import argparse
import json
import os
import struct
import zlib

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def bf16(x):
    """The nearest bf16, ties to even, as 16 bits; and what it stands for."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.astype(np.uint16), (bits << 16).astype(np.uint32).view(np.float32)


def save(path, tensors, metadata):
    """safetensors, of uint16 as bf16."""
    names = {"uint16": "BF16", "float32": "F32", "int64": "I64"}
    header, at = {"__metadata__": metadata}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": names[str(value.dtype)], "shape": list(value.shape),
                        "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            f.write(np.ascontiguousarray(value).tobytes())


def mlp(x, w, names, act):
    gate, up, down = (w[name] for name in names)
    return (act(x @ gate.T) * (x @ up.T)) @ down.T


def block(family, w, x):
    """y, and the router's logits, weights and ids."""
    logits = x @ w[family["router"]].T
    if family["cap"] > 0:
        logits = family["cap"] * np.tanh(logits / family["cap"])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :family["top_k"]]
    weights = np.take_along_axis(p, ids, -1)
    if family["renormalise"]:
        weights = weights / (weights.sum(-1, keepdims=True) + family["epsilon"])
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t], weights[t]):
            names = [f"{family['module']}.experts.{e}.{part}.weight" for part in family["parts"]]
            y[t] += weight * mlp(x[t], w, names, family["act"])
    if family["shared"]:
        names = [f"{family['shared']}.{part}_proj.weight" for part in ("gate", "up", "down")]
        y = y + mlp(x, w, names, family["act"])
    return y * family["scale"], (logits, weights, ids)


def make(name, out, tokens, config, hidden, intermediate, experts, top_k, shared_width=0, layers=1,
         dense={}, **family):
    """`dense`: a layer without experts, and the module of its MLP."""
    family = dict(dict(router="gate", cap=0, renormalise=True, epsilon=0, scale=1, act=silu,
                       shared="", parts=("w1", "w3", "w2"), top_k=top_k), **family)
    family["router"] = f"{family['module']}.{family['router']}.weight"
    seed = zlib.crc32(name.encode())
    random = np.random.default_rng(seed)
    tensors, store = {}, {}

    def shapes_of(prefix, parts, width):
        gate, up, down = (f"{prefix}.{part}.weight" for part in parts)
        return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        if layer in dense:
            shapes = shapes_of(dense[layer], family["parts"], intermediate)
        else:
            shapes = {family["router"]: (experts, hidden)}
            for e in range(experts):
                shapes |= shapes_of(f"{family['module']}.experts.{e}", family["parts"], intermediate)
        if family["shared"]:
            shapes |= shapes_of(family["shared"], ("gate_proj", "up_proj", "down_proj"),
                                shared_width)
        w = {}
        for key, shape in shapes.items():
            std = (1.5 if key == family["router"] else 1.0) / shape[-1]**0.5
            tensors[prefix + key], value = bf16(random.standard_normal(shape) * std)
            w[key] = value.astype(np.float64)
        if layer in dense:
            continue
        x = random.standard_normal((tokens, hidden)).astype(np.float32)
        y, (logits, weights, ids) = block(family, w, x.astype(np.float64))
        module = prefix + family["module"]
        store[f"{module}.input"] = x
        store[f"{module}.output"] = y.astype(np.float32)
        store[f"{module}.gate.gate_out.0"] = logits.astype(np.float32)
        store[f"{module}.gate.gate_out.1"] = weights.astype(np.float32)
        store[f"{module}.gate.gate_out.2"] = ids.astype(np.int64)
    config = dict(hidden_size=hidden, num_hidden_layers=layers, vocab_size=64,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                  rms_norm_eps=1e-5, torch_dtype="bfloat16", **config)
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")
    save(os.path.join(folder, "model.safetensors"), tensors, {"format": "pt"})
    save(os.path.join(folder, "golden.safetensors"), store,
         {"family": name, "seed": str(seed), "numpy": np.__version__})


def grok1(name, out, tokens, **sizes):
    make(name, out, tokens,
         dict(architectures=["Grok1ModelForCausalLM"], model_type="grok-1",
              attn_output_multiplier=0.08838834764831845, max_attn_value=30.0,
              intermediate_size=sizes["intermediate"], num_experts=sizes["experts"],
              num_experts_per_tok=sizes["top_k"], output_router_logits=False,
              router_aux_loss_coef=0.001),
         module="moe_block", parts=("linear", "linear_v", "linear_1"), renormalise=False, act=gelu,
         **sizes)


def grok2(name, out, tokens, cap, **sizes):
    make(name, out, tokens,
         dict(architectures=["Grok1ForCausalLM"], model_type="git", residual_moe=True,
              intermediate_size=sizes["shared_width"], moe_intermediate_size=sizes["intermediate"],
              num_local_experts=sizes["experts"], num_experts_per_tok=sizes["top_k"],
              router_logit_softcapping=cap, attn_logit_softcapping=30.0,
              final_logit_softcapping=50.0, attn_temperature_len=1024, head_dim=12),
         module="block_sparse_moe", renormalise=False, act=gelu, cap=cap, shared="mlp",
         scale=0.5**0.5, **sizes)


def arctic(name, out, tokens, every, **sizes):
    layers = sizes["layers"]
    make(name, out, tokens,
         dict(architectures=["ArcticForCausalLM"], model_type="arctic", hidden_act="silu",
              intermediate_size=sizes["intermediate"], num_local_experts=sizes["experts"],
              num_experts_per_tok=sizes["top_k"], moe_layer_frequency=every, use_residual=True,
              parallel_attn_mlp_res=True, moe_train_capacity_factor=1, moe_eval_capacity_factor=1,
              moe_min_capacity=0, moe_token_dropping=True, enable_expert_tensor_parallelism=False,
              router_aux_loss_coef=0.001, quantization=None),
         module="block_sparse_moe",
         dense={i: "block_sparse_moe.mlp" for i in range(layers) if (i + 1) % every != 0}, **sizes)


def minicpm(name, out, tokens, **sizes):
    make(name, out, tokens,
         dict(architectures=["MiniCPMForCausalLM"], model_type="minicpm", hidden_act="silu",
              intermediate_size=sizes["intermediate"], num_experts=sizes["experts"],
              num_experts_per_tok=sizes["top_k"], dim_model_base=16, scale_depth=1.4,
              scale_emb=12),
         module="mlp", **sizes)


def xverse(name, out, tokens, shared, **sizes):
    make(name, out, tokens,
         dict(architectures=["XverseForCausalLM"], model_type="xverse", hidden_act="silu",
              intermediate_size=sizes["intermediate"], num_experts=sizes["experts"],
              moe_top_k=sizes["top_k"], num_shared_experts=shared, output_router_logits=False,
              router_aux_loss_coef=0.01),
         module="mlp", router="router", parts=("gate_proj", "up_proj", "down_proj"), epsilon=1e-6,
         shared="mlp.shared_experts", shared_width=shared * sizes["intermediate"], **sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "goldens"))
    out = parser.parse_args().out
    small = dict(hidden=48, intermediate=20)
    tiny = dict(hidden=24, intermediate=8)
    grok1("grok1", out, 24, **small, experts=6, top_k=3, layers=2)
    grok1("grok1_real", out, 12, **tiny, experts=8, top_k=2)
    grok2("grok2", out, 24, 1.5, **small, experts=6, top_k=3, layers=2, shared_width=28)
    grok2("grok2_real", out, 12, 30.0, **tiny, experts=8, top_k=2, shared_width=16)
    arctic("arctic", out, 24, 2, **small, experts=12, top_k=3, layers=3)
    arctic("arctic_real", out, 12, 1, **tiny, experts=128, top_k=2, layers=1)
    minicpm("minicpm_moe", out, 24, **small, experts=6, top_k=3, layers=2)
    minicpm("minicpm_moe_real", out, 12, **tiny, experts=8, top_k=2)
    xverse("xverse_moe", out, 24, 3, **small, experts=12, top_k=4, layers=2)
    xverse("xverse_moe_real", out, 12, 2, **tiny, experts=64, top_k=6)


if __name__ == "__main__":
    main()
