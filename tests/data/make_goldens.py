#!/usr/bin/env python3
"""Makes the golden checkpoints of tests/data/goldens: one folder a family and variant, each with

  config.json          as transformers saves it
  model.safetensors    the MoE blocks' weights (and small dense ones), nothing else of the model
  golden.safetensors   what transformers computes in each MoE block: `<module>.input` [T, H],
                       `<module>.output` (or `.output.0`, `.output.1` when the module returns more)
                       and the router's outputs `<module>.<gate|router>.gate_out.<n>`

Weights are random, exact in bf16; routers have nonzero biases, positive and negative; everything is
computed in f32. Only the MoE blocks are ever allocated: the rest of the model stays on torch's meta
device, so that real configurations cost nothing.

Variants of a family:
  <family>          small, odd sizes, dense layers mixed in where the family has them, in the names
                    of published checkpoints
  <family>_merged   the same model in the merged names that transformers 5 uses inside
                    (save_pretrained(save_original_format=False)); left out where they do not differ
  <family>_real     the published number of experts, choices and groups, over tiny matrices

  pip install torch transformers==5.17.0 safetensors      (5.24.0 for the last families of
                                                           golden_families.py)
  ./make_goldens.py --out goldens            all
  ./make_goldens.py --out goldens --only minimax_m2,dbrx_real
  ./make_goldens.py --list

A case's tensors depend on its name (its seed is a checksum of it) and on the versions that
golden.safetensors names, on nothing else. Existing folders are replaced, except those listed in
GIVEN, which came with the project. golden_families.py has the families.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import zlib

import torch
import transformers
from safetensors.torch import load_file, save_file

from golden_families import FAMILIES, GIVEN, REFUSED

BLOCK = re.compile(
    r"(SparseMoeBlock|SparseMoEBlock|MoE|Moe|MoELayer|FFN|GptOssMLP|PrivacyFilterMLP|MoeBlock)$")
# Kept in f32 in the file, as published checkpoints do.
KEEP_F32 = re.compile(r"e_score_correction_bias|expert_bias|router_bias|gate\.bias$|gate\.wg\.")


def is_block(module):
    """Holds a router and experts: the module whose input and output are recorded."""
    name = type(module).__name__
    if not BLOCK.search(name):
        return False
    if hasattr(module, "text_moe"):
        return True
    experts = hasattr(module, "experts") or hasattr(module, "input_linear")
    router = hasattr(module, "gate") or hasattr(module, "router")
    return experts and router


def is_gemma_layer(module):
    return hasattr(module, "router") and hasattr(module, "pre_feedforward_layernorm_2")


def fill(name, tensor, generator):
    """Random values that exercise the rule the tensor belongs to."""
    shape = tuple(tensor.shape)

    def normal(std, mean=0.0):
        return torch.randn(shape, generator=generator) * std + mean

    if not tensor.is_floating_point():
        return None
    leaf = name.rsplit(".", 1)[-1]
    if "e_score_correction_bias" in name or leaf in ("expert_bias", "balancing_biases"):
        return normal(0.15, -0.05)
    if leaf == "per_expert_scale":
        return torch.rand(shape, generator=generator) + 0.5
    if leaf == "global_scale":
        return torch.rand(shape, generator=generator) * 0.5 + 0.75
    if "norm" in name or leaf == "scale":
        return normal(0.1, 1.0)
    if "bias" in leaf:
        return normal(0.3)
    if "shared_expert_gate" in name:
        return normal(1.0 / shape[-1]**0.5)
    if re.search(r"(gate|router|wg|classifier|layer|proj)\.weight$", name) and re.search(
            r"\.(gate|router)\.", "." + name):
        return normal(1.5 / shape[-1]**0.5)
    # [out, in], or stacked: either of the last two dimensions may be the inner one.
    return normal(1.0 / min(shape[-2:])**0.5 if len(shape) > 1 else 0.1)


def materialize(module, prefix, generator):
    """Moves a meta module to the CPU and fills it with values exact in bf16."""
    module.to_empty(device="cpu")
    tensors = dict(module.named_parameters())
    tensors.update({k: v for k, v in module.named_buffers()})
    for name, tensor in sorted(tensors.items()):
        with torch.no_grad():
            if not tensor.is_floating_point():  # hash tables
                tensor.copy_(hash_table(tensor, module, generator))
                continue
            tensor.copy_(fill(prefix + "." + name, tensor, generator).bfloat16().float())


def hash_table(tensor, module, generator):
    """[V, k] distinct expert ids a row."""
    experts = module.gate.weight.shape[0]
    rows = [torch.randperm(experts, generator=generator)[:tensor.shape[1]]
            for _ in range(tensor.shape[0])]
    return torch.stack(rows).to(tensor.dtype)


def record(store, name, value):
    if isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            if torch.is_tensor(part):
                record(store, f"{name}.{i}", part)
        return
    value = value.detach()
    if value.is_floating_point():
        value = value.float()
    store[name] = value.reshape(-1, value.shape[-1]).contiguous().clone()


def run_block(name, module, tokens, hidden, generator, store):
    """Calls the block on random hidden states and records it and its router."""
    x = torch.randn(1, tokens, hidden, generator=generator)
    hooks = []
    for child in ("gate", "router"):
        if hasattr(module, child):
            def hook(_m, _i, out, child=child):
                record(store, f"{name}.{child}.gate_out", out)
            hooks.append(getattr(module, child).register_forward_hook(hook))
    if hasattr(module, "text_moe"):
        hooks.append(module.text_moe.gate.register_forward_hook(
            lambda _m, _i, out: record(store, f"{name}.gate.gate_out", out)))
    store[name + ".input"] = x.reshape(-1, hidden).clone()
    kwargs = {}
    if getattr(module, "is_hash", False):
        kwargs["input_ids"] = torch.randint(0, module.gate.tid2eid.shape[0], (1, tokens),
                                            generator=generator)
        store[name + ".token_ids"] = kwargs["input_ids"].reshape(-1).clone()
    with torch.no_grad():
        out = module(x.clone(), **kwargs)
    record(store, name + ".output", out)
    for h in hooks:
        h.remove()


def run_gemma(name, layer, tokens, hidden, generator, store):
    """Gemma 4 has no module for the block: its router and experts both read the residual stream,
    through a norm of their own."""
    x = torch.randn(tokens, hidden, generator=generator) * 3
    store[name + ".moe.input"] = x
    with torch.no_grad():
        routed = layer.router(x)
        record(store, name + ".moe.router.gate_out", routed)
        out = layer.experts(layer.pre_feedforward_layernorm_2(x), routed[2], routed[1])
    record(store, name + ".moe.output", out)


def build(family, variant):
    """The model on the meta device, its blocks on the CPU."""
    config = family.config(variant)
    cls = getattr(transformers, family.model) or family.model_class()
    with torch.device("meta"):
        # The plain loop over experts: the definition, and any size goes.
        model = cls._from_config(config, experts_implementation="eager").eval()
    return model


def real_state(model):
    return {k: v for k, v in model.state_dict().items() if not v.is_meta}


def save(model, state, folder, original, shard):
    """save_pretrained in the wanted names, then to bf16; only what is not on the meta device."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp, state_dict=dict(state), save_original_format=original,
                              max_shard_size=shard or "1GB")
        files = [f for f in os.listdir(tmp) if f.endswith(".safetensors")]
        for f in files:
            tensors = load_file(os.path.join(tmp, f))
            for k in tensors:
                if tensors[k].is_floating_point() and not KEEP_F32.search(k):
                    tensors[k] = tensors[k].bfloat16()
            save_file(tensors, os.path.join(folder, f), metadata={"format": "pt"})
        index = os.path.join(tmp, "model.safetensors.index.json")
        if os.path.exists(index):
            shutil.copy(index, folder)
        with open(os.path.join(tmp, "config.json")) as f:
            config = json.load(f)
    config["dtype"] = "bfloat16"
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")
    names = []
    for f in files:
        names += list(load_file(os.path.join(folder, f)))
    return sorted(names)


def make(case, family, variant, naming, out, tokens):
    # Both namings of a variant hold the same model.
    seed = zlib.crc32(f"{family.name} {variant}".encode())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build(family, variant)
    store = {}
    hidden = family.hidden(model.config)
    blocks = []
    for name, module in model.named_modules():
        if is_block(module):
            blocks.append((name, module, run_block))
        elif is_gemma_layer(module):
            blocks.append((name, module, run_gemma))
    blocks = [b for b in blocks if not any(
        b[0].startswith(o[0] + ".") for o in blocks if o is not b)]
    blocks = [b for b in blocks if re.search(family.only, b[0])]
    if not blocks:
        raise RuntimeError(f"{case}: no MoE block found")
    for name, module, call in blocks:
        if call is run_gemma:
            for child in ("router", "experts", "pre_feedforward_layernorm_2", "mlp"):
                materialize(getattr(module, child), name + "." + child, generator)
        else:
            materialize(module, name, generator)
        call(name, module, tokens, hidden, generator, store)
    for name, module in model.named_modules():
        if re.search(r"layers\.\d+\.(mlp|feed_forward|shared_mlp)$", name) and re.search(
                family.only, name):
            size = sum(p.numel() for p in module.parameters())
            if size < 200_000 and any(p.is_meta for p in module.parameters()):
                materialize(module, name, generator)
    folder = os.path.join(out, case)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    names = save(model, real_state(model), folder, naming == "published", family.shard(variant))
    if family.rename and naming == "published":
        names = family.rename(folder)
    save_file(store, os.path.join(folder, "golden.safetensors"), metadata={
        "family": family.name, "variant": variant, "naming": naming, "seed": str(seed),
        "transformers": transformers.__version__, "torch": torch.__version__})
    return names


def cases():
    for family in FAMILIES:
        for variant in ("small", "real"):
            if variant not in family.variants:
                continue
            base = family.name + ("" if variant == "small" else "_real")
            for naming in ("published", "merged"):
                if naming == "merged" and (variant == "real" or family.one_naming):
                    continue
                case = base + ("" if naming == "published" else "_merged")
                if case not in GIVEN:
                    yield case, family, variant, naming


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "goldens"))
    parser.add_argument("--only", default="", help="cases, separated by commas")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--names", action="store_true", help="print the tensors of each case")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    chosen = [c for c in cases() if not only or c[0] in only]
    if args.list:
        for case, family, variant, naming in chosen:
            print(f"{case:32} {family.model:44} {variant:6} {naming}")
        for name, why in REFUSED.items():
            print(f"{name:32} refused: {why}")
        return 0
    unknown = only - {c[0] for c in chosen}
    if unknown:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; see --list")
    torch.set_num_threads(1)
    failed = []
    for case, family, variant, naming in chosen:
        tokens = args.tokens if variant == "small" else max(8, args.tokens // 2)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                names = make(case, family, variant, naming, args.out, tokens)
        except Exception as e:  # one family must not stop the others
            failed.append(case)
            print(f"{case:32} FAILED: {type(e).__name__}: {e}")
            continue
        size = sum(os.path.getsize(os.path.join(args.out, case, f))
                   for f in os.listdir(os.path.join(args.out, case)))
        print(f"{case:32} {len(names):5} tensors {size / 1024:8.0f} KiB")
        if args.names:
            for n in names:
                if not re.search(r"experts\.[1-9]\d*\.", n):
                    print("    " + n)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
