#!/usr/bin/env python3
"""Writes golden_rows.json: what the routers of transformers compute for a few rows of logits.

    python3 tests/route/make_golden_rows.py > tests/route/golden_rows.json

A router's weight is the identity here, so that its input is its logits. Rules whose model
transformers does not have are written out. Needs torch and transformers 5.
"""
import importlib
import json
import math
import types

import torch
from torch import nn

torch.manual_seed(20)
E, ROWS = 16, 6
cases = []


def config(k, **fields):
    """Every name that a family has for the number of experts and of choices."""
    common = dict(hidden_size=E, num_experts=E, n_routed_experts=E, num_local_experts=E,
                  num_experts_per_tok=k, moe_topk=k, top_k_experts=k, routed_scaling_factor=1.0)
    return types.SimpleNamespace(**{**common, **fields})


def load(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def router_of(family, name, k, **fields):
    """A router and the module that holds its weight, set to the identity."""
    router = load(family, name)(config(k, **fields))
    for holder in (router, *router.children()):
        if isinstance(getattr(holder, "weight", None), nn.Parameter) and holder.weight.dim() == 2:
            with torch.no_grad():
                holder.weight.copy_(torch.eye(*holder.weight.shape))
    return router


def set_to(module, name, scale=0.3, shift=0.0):
    tensor = getattr(module, name)
    with torch.no_grad():
        tensor.copy_(shift + scale * torch.randn(tensor.shape))
    return tensor.detach().clone()


def logits(columns=E):
    return 2 * torch.randn(ROWS, columns)


def numbers(tensor):
    # The shortest decimals that read back as the same f32.
    return [float(str(x)) for x in tensor.detach().float().flatten().numpy()]


def add(name, k, spec, x, ids, weights, **vectors):
    """ids and weights [T, S], in any order of slots."""
    cases.append(dict(name=name, spec=dict(experts=E, top_k=k, **spec), tokens=len(x),
                      logits=numbers(x), ids=[int(i) for i in ids.flatten()],
                      weights=numbers(weights),
                      **{key: numbers(value) for key, value in vectors.items()}))


def run(name, k, spec, router, columns=E, arguments=(), **vectors):
    """A router that returns (logits, weights, ids)."""
    x = logits(columns)
    _, weights, ids, *_ = router(x, *arguments)
    add(name, k, spec, x, ids, weights, **vectors)


over_sum = dict(renormalize=True, renormalize_epsilon=0)
sigmoid = dict(score="sigmoid")
biased = dict(selection_bias=True)

# R1, R2
run("R1 mixtral", 2, over_sum, router_of("mixtral", "MixtralTopKRouter", 2))
for norm in (False, True):
    run(f"{'R1' if norm else 'R2'} qwen2_moe", 4, over_sum if norm else {},
        router_of("qwen2_moe", "Qwen2MoeTopKRouter", 4, norm_topk_prob=norm))

# R3
router = router_of("gpt_oss", "GptOssTopKRouter", 4)
bias = set_to(router, "bias")
run("R3 gpt_oss", 4, dict(score_stage="after_top_k", router_bias=True), router, router_bias=bias)

# R4
for k in (1, 2):
    x = logits()
    dense, _ = router_of("llama4", "Llama4Router", k)(x)
    weights, ids = dense.topk(k)
    add("R4 llama4", k, dict(sigmoid, score_stage="after_top_k", weight_on_input=True), x, ids,
        weights)

# R5
run("R5 deepseek_v2", 4, dict(groups=dict(count=4, keep=2), scale=16),
    router_of("deepseek_v2", "DeepseekV2TopkRouter", 4, n_group=4, topk_group=2,
              topk_method="group_limited_greedy", routed_scaling_factor=16.0))

# R6: with groups, without, and with q all negative
for groups, keep, norm, shift in ((4, 2, True, 0.0), (1, 1, True, 0.0), (4, 2, False, -5.0)):
    router = router_of("deepseek_v3", "DeepseekV3TopkRouter", 4, n_group=groups, topk_group=keep,
                       norm_topk_prob=norm, routed_scaling_factor=2.5)
    bias = set_to(router, "e_score_correction_bias", shift=shift)
    run(f"R6 deepseek_v3, {groups} groups, bias around {shift}", 4,
        dict(sigmoid, **biased, renormalize=norm, scale=2.5,
             groups=dict(count=groups, keep=keep, rank_by="sum_of_top_2")), router,
        selection_bias=bias)

# R7
bias = 0.3 * torch.randn(E)
run("R7 minimax_m2", 8, dict(sigmoid, **biased, **over_sum),
    router_of("minimax_m2", "MiniMaxM2TopKRouter", 8), arguments=(bias,), selection_bias=bias)

# R8
v4 = dict(scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, vocab_size=9)
v4_spec = dict(score="sqrt_softplus", renormalize=True, scale=1.5)
router = router_of("deepseek_v4", "DeepseekV4TopKRouter", 6, **v4)
bias = set_to(router, "e_score_correction_bias")
run("R8 deepseek_v4", 6, dict(v4_spec, **biased), router, selection_bias=bias)
router = router_of("deepseek_v4", "DeepseekV4HashRouter", 6, **v4)
router.tid2eid.copy_(torch.stack([torch.randperm(E)[:6] for _ in range(9)]))
tokens = torch.tensor([3, 0, 8, 1, 3, 5])
run("R8 deepseek_v4, hashed", 6, dict(v4_spec, hashed=True), router, arguments=(tokens,),
    token_ids=tokens, hash_table=router.tid2eid)

# R9
router = router_of("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", 6, moe_num_experts=E,
                   moe_norm_min=1e-12)
bias = set_to(router.moe_statics, "e_score_correction_bias", scale=0.05)
run("R9 ernie4_5_moe", 6, dict(biased, renormalize=True, renormalize_epsilon=1e-12,
                               epsilon_rule="floor"), router, selection_bias=bias)

# R10
run("R10 hunyuan_v1_moe", 3, over_sum, router_of("hunyuan_v1_moe", "HunYuanMoEV1Gate", 3))

# R11: groups by their maximum (Mistral Large 3), and by the sum of two
x = logits()
p = x.softmax(-1)
keep = p.view(ROWS, 4, 4).amax(-1).topk(2).indices
mask = torch.zeros(ROWS, 4).scatter_(1, keep, 1).repeat_interleave(4, 1)
weights, ids = p.masked_fill(mask == 0, -math.inf).topk(4)
add("R11 grouped softmax", 4, dict(groups=dict(count=4, keep=2), renormalize=True), x, ids,
    weights / weights.sum(-1, keepdim=True))
run("R11 mistral4", 4,
    dict(groups=dict(count=4, keep=2, rank_by="sum_of_top_2"), renormalize=True),
    router_of("mistral4", "Mistral4TopkRouter", 4, n_group=4, topk_group=2, norm_topk_prob=True))

# R12: Grok-1, and a cap before a sigmoid
x = 10 * logits()
weights, ids = (30 * torch.tanh(x / 30)).softmax(-1).topk(2)
add("R12 grok-1", 2, dict(soft_cap=30), x, ids, weights)
router = router_of("laguna", "LagunaTopKRouter", 4, moe_router_logit_softcapping=5.0)
bias = set_to(router, "e_score_correction_bias")
run("R12 laguna", 4, dict(sigmoid, soft_cap=5, **biased, **over_sum), router, selection_bias=bias)

# R13: the router's norm and its scale come before its projection
router = router_of("gemma4", "Gemma4TextRouter", 4, rms_norm_eps=1e-6)
router.norm = nn.Identity()
router.scalar_root_size = 1.0
scale = set_to(router, "per_expert_scale", shift=1.0)
run("R13 gemma4", 4, dict(over_sum, per_expert_scale=True), router, per_expert_scale=scale)

# R14
for norm in (False, True):
    run("R14 cohere2_moe", 4, dict(sigmoid, **(over_sum if norm else {})),
        router_of("cohere2_moe", "Cohere2MoeTopKRouter", 4, expert_selection_fn="sigmoid",
                  norm_topk_prob=norm))
bias = 0.3 * torch.randn(E)
run("R14 lfm2_moe", 4, dict(sigmoid, **biased, renormalize=True, renormalize_epsilon=1e-6),
    router_of("lfm2_moe", "Lfm2MoeTopKRouter", 4, use_expert_bias=True, norm_topk_prob=True),
    arguments=(bias,), selection_bias=bias)

# R15: zero-compute experts are ids like the others
router = router_of("longcat_flash", "LongcatFlashTopkRouter", 4, n_routed_experts=E - 4,
                   zero_expert_num=4, routed_scaling_factor=6.0)
bias = set_to(router, "e_score_correction_bias", scale=0.05)
x = logits()
weights, ids = router(x)
add("R15 longcat_flash", 4, dict(biased, scale=6), x, ids, weights, selection_bias=bias)
# R16: logits near each other, of both signs, so that sparsemixer's threshold keeps several
sparsemixer = load("phimoe", "sparsemixer")
for x in (logits(), 3 + 0.1 * torch.randn(ROWS, E), -3 + 0.1 * torch.randn(ROWS, E)):
    weights, ids = sparsemixer(x, 0.01, False, 2)
    add("R16 phimoe", 2, dict(score="sparsemixer", jitter=0.01), x, ids, weights)

# Shared experts scored by the router, with a learnt scale of everything
router = router_of("inkling", "InklingTopkRouter", 4, hidden_size=E + 2, n_shared_experts=2,
                   route_scale=1.5)
bias = set_to(router, "e_score_correction_bias")
with torch.no_grad():
    router.global_scale.fill_(0.8)
x = logits(E + 2)
_, weights, ids, shared = router(x)
add("inkling", 4, dict(sigmoid, **biased, **over_sum, scale=1.2,
                       shared=dict(count=2, weight="joint")), x,
    torch.cat([ids, torch.tensor([[E, E + 1]]).expand(ROWS, 2)], 1),
    torch.cat([weights, shared], 1), selection_bias=bias)

print("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]")
