#!/usr/bin/env python3
"""Whether the package compressed-tensors reads what `shunt convert` writes: its own decompression of a
converted model must be as far from the original as Shunt says.

  compressed_tensors_check.py SHUNT MODEL      77 where torch or compressed-tensors is missing
"""

import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

FORMATS = ["fp8_tensor", "fp8_channel", "mxfp8", "nvfp4", "mxfp4", "int8", "int4:32", "int4:128"]


def check(shunt, model, fmt, source, folder):
    out = os.path.join(folder, fmt.replace(":", "_"))
    done = subprocess.run([shunt, "convert", model, out, "--to", fmt, "--json"],
                          check=True, capture_output=True, text=True)
    said = {(e["layer"], e["expert"]): e for e in json.loads(done.stdout)["experts"]}
    with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
        config = QuantizationConfig.model_validate(json.load(file)["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry(config.format)
    scheme = next(iter(config.config_groups.values()))
    tensors = load_file(os.path.join(out, "model.safetensors"))
    for layer, expert in ((0, 0), (1, 5), (3, 15)):
        for part in ("gate", "up", "down"):
            module = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj."
            state = {k[len(module):]: v for k, v in tensors.items() if k.startswith(module)}
            weight = compressor.decompress(state, scheme)["weight"].double()
            original = source[module + "weight"].double()
            error = ((weight - original).norm() / original.norm()).item()
            ours = said[layer, expert][part + "_error"]
            # They decode to bf16, which adds 2^-9 / sqrt(3) of noise at most.
            assert abs(error**2 - ours**2) <= 2 * ours * 2e-4 + 2e-6, (fmt, module, error, ours)
    print(f"{fmt}: as Shunt says")


def main():
    shunt, model = sys.argv[1:]
    source = load_file(os.path.join(model, "model.safetensors"))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for fmt in FORMATS:
            check(shunt, model, fmt, source, folder)


if __name__ == "__main__":
    main()
