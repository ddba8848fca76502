#!/usr/bin/env python3
"""Makes the quantised checkpoints of tests/data/quantised: one folder a dialect, each with

  config.json           with the quantization_config that such checkpoints are published with
  model.safetensors     one layer of a small MoE in that dialect; the router is plain
  expected.safetensors  gate.<e>, up.<e>, down.<e> in f32, decoded on the CPU by a package's own code:
    compressed-tensors  its own dialects, and fp8_block* by its dequantiser of such checkpoints
    transformers        mxfp4_gpt_oss, mxfp4_deepseek_v4, mxfp8
    nvidia-modelopt     fp8_tensor, nvfp4_modelopt
    gptqmodel           gptq, gptq_v2, awq

  pip install torch==2.15.0 safetensors==0.8.0 transformers==5.24.0 compressed-tensors==0.20.0
  pip install nvidia-modelopt==0.47.0 gptqmodel==7.7.0
  ./make_quantised.py --out quantised      makes them all, with all of the packages
  ./make_quantised.py --check quantised    decodes the committed ones again, by the packages that are
                                           there, and says which: 0 all equal, 1 not, 77 none decoded
"""

import argparse
import functools
import importlib
import json
import os
import sys
import zlib
from importlib.metadata import version

try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"make_quantised.py: {missing}", file=sys.stderr)
    sys.exit(77)

EXPERTS = 2
DECODERS = {  # packages, and the module of each that asks most of others
    "compressed-tensors": "compressed_tensors.entrypoints.convert.converters",
    "transformers": "transformers.integrations.finegrained_fp8",
    "nvidia-modelopt": "modelopt.torch.quantization.qtensor",
    "gptqmodel": "gptqmodel.nn_modules.qlinear.torch",
}


@functools.cache
def absent(package):
    """Why a package cannot be used, if so."""
    try:
        importlib.import_module(DECODERS[package])
    except Exception as error:  # beside other packages' versions it may fail in any way
        return f"{package}: {type(error).__name__}: {error}"
    return None


def qwen3(hidden, intermediate, quantisation):
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "moe_intermediate_size": intermediate, "num_experts": EXPERTS, "num_experts_per_tok": 1,
        "num_hidden_layers": 1, "norm_topk_prob": True, "hidden_act": "silu", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "intermediate_size": 128, "quantization_config": quantisation,
    }


def deepseek_v4(hidden, intermediate):
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": hidden,
        "moe_intermediate_size": intermediate, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 1, "num_hidden_layers": 1, "mlp_layer_types": ["moe"], "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "expert_dtype": "fp4", "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                                "modules_to_not_convert": ["model.layers.0.ffn.shared_experts"]},
    }


def gpt_oss(hidden, intermediate):
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_local_experts": EXPERTS, "num_experts_per_tok": 1,
        "num_hidden_layers": 1, "hidden_act": "silu", "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]},
    }


def random(name, *shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=generator)


def codes(name, low, high, *shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(low, high, shape, generator=generator)


def e4m3(name, n, k):
    return (random(name, n, k) * 60).to(torch.float8_e4m3fn)


def pieces(k, group):
    return (k + group - 1) // group


def dequantised_by_transformers(weight, scale):
    """It gives bf16, which holds any code times a power of two."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made = Fp8Dequantize(None).convert({"x.weight": [weight], "x.weight_scale_inv": [scale]})
    return made["x.weight"][0].float()


def dequantised_by_modelopt(kind, t, k, **scales):
    from modelopt.torch.quantization import qtensor

    made = getattr(qtensor, kind)((t["weight"].shape[0], k), torch.float32, t["weight"])
    return made.dequantize(torch.float32, scale=t["weight_scale"], **scales)


# ---- dialects: tensors of one matrix [n, k], and its weights from them ----------------------------


class Fp8Block:
    package = "compressed-tensors"

    def __init__(self, dtype, name="weight_scale_inv"):
        self.dtype, self.name = dtype, name

    def make(self, name, n, k):
        s = random(name + "s", pieces(n, 128), pieces(k, 128)).abs() * 0.01 + 0.001
        if self.dtype == torch.float8_e8m0fnu:
            s = torch.exp2(torch.floor(torch.log2(s)))
        return {"weight": e4m3(name, n, k), self.name: s.to(self.dtype)}

    def decode(self, t):
        from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

        tensors = {"x.weight": t["weight"], "x.weight_scale_inv": t[self.name]}
        return FP8BlockDequantizer(dtype=torch.float32).process(tensors)["x.weight"]


class Mxfp8:
    package = "transformers"

    def make(self, name, n, k):
        return {"weight": e4m3(name, n, k), "weight_scale_inv": codes(name + "s", 110, 130, n, k // 32).to(torch.uint8)}

    def decode(self, t):
        return dequantised_by_transformers(t["weight"], t["weight_scale_inv"])


class Fp8Tensor:
    package = "nvidia-modelopt"

    def make(self, name, n, k):
        return {"weight": e4m3(name, n, k), "weight_scale": random(name + "s", 1)[0].abs() * 0.01 + 0.001,
                "input_scale": torch.tensor(0.5)}

    def decode(self, t):
        return dequantised_by_modelopt("FP8QTensor", t, t["weight"].shape[1])


class Nvfp4ModelOpt:
    package = "nvidia-modelopt"

    def make(self, name, n, k):
        return {"weight": codes(name, 0, 256, n, k // 2).to(torch.uint8),
                "weight_scale": random(name + "s", n, k // 16).abs().mul(100).to(torch.float8_e4m3fn),
                "weight_scale_2": random(name + "g", 1)[0].abs() * 1e-4 + 1e-5, "input_scale": torch.tensor(0.5)}

    def decode(self, t):
        # It multiplies in the dtype of this [1]: f64 rounds once, f32 would round the scales' product
        # too. Its zeros have no sign; those committed do, which is equal.
        return dequantised_by_modelopt("NVFP4QTensor", t, 2 * t["weight"].shape[1], block_sizes={-1: 16},
                                       double_scale=t["weight_scale_2"].double().reshape(1))


class Mxfp4DeepSeek:
    package = "transformers"

    def make(self, name, n, k):
        return {"weight": codes(name, 0, 256, n, k // 2).to(torch.uint8).view(torch.int8),
                "scale": codes(name + "s", 110, 130, n, k // 32).to(torch.uint8).view(torch.float8_e8m0fnu)}

    def decode(self, t):
        return dequantised_by_transformers(t["weight"], t["scale"])


class Compressed:
    """What compressed-tensors makes, and its own decoder."""

    package = "compressed-tensors"

    def __init__(self, form, **weights):
        self.form, self.weights = form, weights

    @functools.cached_property
    def scheme(self):
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**self.weights))

    @functools.cached_property
    def compressor(self):
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(self.form)

    def make(self, name, n, k):
        w, args = random(name, n, k) * 0.05, self.scheme.weights
        state = {"weight": w}
        if self.form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (2688 / w.abs().max()).reshape(1)
            amax = w.reshape(n, k // 16, 16).abs().amax(-1)
            state["weight_scale"] = (amax / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            group = args.group_size or k
            parts = w.reshape(n, k // group, group)
            if args.symmetric:
                top = 448.0 if args.type == "float" else 2 ** (args.num_bits - 1) - 0.5
                state["weight_scale"] = (parts.abs().amax(-1) / top).bfloat16()
            else:
                low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
                state["weight_scale"] = ((high - low) / 15).bfloat16()
                state["weight_zero_point"] = (torch.round(-low / state["weight_scale"].float()) - 8).clamp(-8, 7).to(torch.int8)
        state = {key: value.float() if key == "weight_scale" else value for key, value in state.items()}
        made = self.compressor.compress(state, self.scheme)
        if self.form != "nvfp4-pack-quantized":
            made["weight_scale"] = made["weight_scale"].bfloat16()
        return {key: torch.as_tensor(value).detach() for key, value in made.items()}

    def decode(self, t):
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        state = dict(t)
        if "weight_global_scale" in t:  # its decompress() would round to bf16
            codes = unpack_fp4_from_uint8(t["weight_packed"], t["weight_packed"].shape[0], 2 * t["weight_packed"].shape[1])
            return dequantize(codes.float(), t["weight_scale"].float(), args=self.scheme.weights,
                              global_scale=t["weight_global_scale"], dtype=torch.float32)
        if t["weight_scale"].dtype == torch.bfloat16:
            state["weight_scale"] = t["weight_scale"].float()
        return self.compressor.decompress(state, self.scheme)["weight"].detach().float()


class Gptq:
    package = "gptqmodel"

    def __init__(self, group, v2, shuffled):
        self.group, self.v2, self.shuffled = group, v2, shuffled

    def make(self, name, n, k):
        groups = pieces(k, self.group)
        q = codes(name, 0, 16, k // 8, 8, n)
        z = codes(name + "z", 0 if self.v2 else 1, 16, groups, n // 8, 8) - (0 if self.v2 else 1)
        order = torch.arange(k) // self.group
        if self.shuffled:
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))]
        shifts = torch.arange(8) * 4
        return {"qweight": (q << shifts.reshape(1, 8, 1)).sum(1).to(torch.uint32).view(torch.int32),
                "qzeros": (z << shifts).sum(-1).to(torch.uint32).view(torch.int32),
                "scales": (random(name + "s", groups, n).abs() * 0.01 + 0.001).half(), "g_idx": order.int()}

    def decode(self, t):
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

        linear = TorchLinear(bits=4, group_size=self.group, sym=False, desc_act=self.shuffled,
                             in_features=8 * t["qweight"].shape[0], out_features=t["qweight"].shape[1])
        linear.float().load_state_dict(t)  # in f16 its products would be rounded
        if not self.v2:
            convert_gptq_v1_to_v2_format_module(linear, 4, torch.int32)
        return linear.dequantize_weight().T


class Awq:
    package = "gptqmodel"
    ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

    def __init__(self, group):
        self.group = group

    def words(self, values):
        values = values.reshape(values.shape[0], -1, 8)[:, :, self.ORDER]
        return (values << (torch.arange(8) * 4)).sum(-1).to(torch.uint32).view(torch.int32)

    def make(self, name, n, k):
        groups = pieces(k, self.group)
        return {"qweight": self.words(codes(name, 0, 16, k, n)), "qzeros": self.words(codes(name + "z", 0, 16, groups, n)),
                "scales": (random(name + "s", groups, n).abs() * 0.01 + 0.001).half()}

    def decode(self, t):
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        return dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, self.group).T


def compressed_config(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "ignore": ["re:.*mlp.gate$", "lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def compressed(form, hidden=64, intermediate=32, **weights):
    return (qwen3(hidden, intermediate, compressed_config(form, **weights)), Compressed(form, **weights))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
       "modules_to_not_convert": ["model.layers.0.mlp.gate"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES = {
    "fp8_block": (qwen3(136, 24, FP8), Fp8Block(torch.float32)),
    "fp8_block_bf16": (qwen3(136, 24, FP8), Fp8Block(torch.bfloat16, "weight_scale")),
    "fp8_block_ue8m0": (qwen3(136, 24, FP8), Fp8Block(torch.float8_e8m0fnu)),
    "fp8_channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "fp8_tensor": (qwen3(64, 32, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*mlp.gate"]}), Fp8Tensor()),
    "mxfp8": (qwen3(64, 32, FP8), Mxfp8()),
    "nvfp4_modelopt": (qwen3(64, 32, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*mlp.gate"]}),
                       Nvfp4ModelOpt()),
    "nvfp4_compressed": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                                   group_size=16, symmetric=True),
    "mxfp4_deepseek_v4": (deepseek_v4(64, 32), Mxfp4DeepSeek()),
    "int4": compressed("pack-quantized", symmetric=True, **INT4),
    "int4_zeros": compressed("pack-quantized", symmetric=False, **INT4),
    "int4_channel": compressed("pack-quantized", hidden=40, intermediate=16, num_bits=4, type="int", strategy="channel",
                               symmetric=True),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "int8_packed": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "gptq": (qwen3(64, 32, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}),
             Gptq(32, False, True)),
    "gptq_v2": (qwen3(64, 32, {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}),
                Gptq(16, True, False)),
    "awq": (qwen3(64, 32, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
            Awq(32)),
}


def matrices(config):
    h, i = config["hidden_size"], config["moe_intermediate_size"]
    names = ("w1", "w3", "w2") if config["model_type"] == "deepseek_v4" else ("gate_proj", "up_proj", "down_proj")
    module = "ffn" if config["model_type"] == "deepseek_v4" else "mlp"
    for e in range(EXPERTS):
        for part, name, n, k in zip(("gate", "up", "down"), names, (i, i, h), (h, h, i)):
            yield f"{part}.{e}", f"model.layers.0.{module}.experts.{e}.{name}", n, k


def make_case(name, config, dialect):
    tensors = {}
    module = "ffn" if config["model_type"] == "deepseek_v4" else "mlp"
    tensors[f"model.layers.0.{module}.gate.weight"] = random(name + "router", EXPERTS, config["hidden_size"]).bfloat16()
    if module == "ffn":
        tensors["model.layers.0.ffn.gate.bias"] = random(name + "bias", EXPERTS)
        h, i = config["hidden_size"], config["moe_intermediate_size"]
        for part, n, k in (("w1", i, h), ("w3", i, h), ("w2", h, i)):
            tensors[f"model.layers.0.ffn.shared_experts.{part}.weight"] = random(name + part, n, k).bfloat16()
    for _, base, n, k in matrices(config):
        for key, value in dialect.make(name + base, n, k).items():
            tensors[f"{base}.{key}"] = value.contiguous()
    return tensors


def decode_case(config, dialect, tensors):
    expected = {}
    for part, base, _, _ in matrices(config):
        own = {key[len(base) + 1:]: value for key, value in tensors.items() if key.startswith(base + ".")}
        expected[part] = dialect.decode(own).contiguous()
    return expected


def make_gpt_oss(h=64, i=32):
    base = "model.layers.0.mlp."
    name = "mxfp4_gpt_oss"
    return {
        base + "router.weight": random(name + "r", EXPERTS, h).bfloat16(),
        base + "router.bias": random(name + "b", EXPERTS).bfloat16(),
        base + "experts.gate_up_proj_blocks": codes(name + "u", 0, 256, EXPERTS, 2 * i, h // 32, 16).to(torch.uint8),
        base + "experts.gate_up_proj_scales": codes(name + "us", 110, 130, EXPERTS, 2 * i, h // 32).to(torch.uint8),
        base + "experts.gate_up_proj_bias": random(name + "ub", EXPERTS, 2 * i).bfloat16(),
        base + "experts.down_proj_blocks": codes(name + "d", 0, 256, EXPERTS, h, i // 32, 16).to(torch.uint8),
        base + "experts.down_proj_scales": codes(name + "ds", 110, 130, EXPERTS, h, i // 32).to(torch.uint8),
        base + "experts.down_proj_bias": random(name + "db", EXPERTS, h).bfloat16(),
    }


def decode_gpt_oss(tensors):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    base = "model.layers.0.mlp.experts."
    up = convert_moe_packed_tensors(tensors[base + "gate_up_proj_blocks"], tensors[base + "gate_up_proj_scales"],
                                    dtype=torch.float32)
    down = convert_moe_packed_tensors(tensors[base + "down_proj_blocks"], tensors[base + "down_proj_scales"],
                                      dtype=torch.float32)
    expected = {}
    for e in range(EXPERTS):
        expected[f"gate.{e}"] = up[e, :, 0::2].T.contiguous()
        expected[f"up.{e}"] = up[e, :, 1::2].T.contiguous()
        expected[f"down.{e}"] = down[e].T.contiguous()
        expected[f"gate_bias.{e}"] = tensors[base + "gate_up_proj_bias"][e, 0::2].float().contiguous()
        expected[f"up_bias.{e}"] = tensors[base + "gate_up_proj_bias"][e, 1::2].float().contiguous()
    return expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--check")
    args = parser.parse_args()
    missing = [reason for reason in map(absent, DECODERS) if reason]
    if args.out and missing:
        print("make_quantised.py:", "; ".join(missing), file=sys.stderr)
        return 77
    checked = wrong = 0
    for name in [*CASES, "mxfp4_gpt_oss"]:
        folder = os.path.join(args.out or args.check, name)
        config, dialect = CASES.get(name, (gpt_oss(64, 32), None))
        package = dialect.package if dialect else "transformers"
        if args.out:
            os.makedirs(folder, exist_ok=True)
            tensors = make_case(name, config, dialect) if dialect else make_gpt_oss()
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file, indent=1)
                file.write("\n")
            save_file(tensors, os.path.join(folder, "model.safetensors"))
        elif absent(package):
            print(f"{name}: not checked, {absent(package)}")
            continue
        tensors = load_file(os.path.join(folder, "model.safetensors"))
        expected = decode_case(config, dialect, tensors) if dialect else decode_gpt_oss(tensors)
        if args.out:
            save_file(expected, os.path.join(folder, "expected.safetensors"))
            continue
        committed = load_file(os.path.join(folder, "expected.safetensors"))
        equal = committed.keys() == expected.keys() and all(torch.equal(committed[k], expected[k]) for k in expected)
        print(f"{name}: {'as' if equal else 'OTHERWISE THAN'} {package} {version(package)} decodes it")
        checked += 1
        wrong += not equal
    return 1 if wrong else 0 if checked or args.out else 77


if __name__ == "__main__":
    sys.exit(main())
