#!/usr/bin/env python3
"""Whether transformers loads what `shunt convert` writes, whole: the first bytes of a text must cost its
model as many bits as `shunt eval` says.

  transformers_check.py SHUNT MODEL      77 where torch or transformers is missing

Of compressed-tensors' formats, transformers 5.17 reads merged experts in those below. Of NVFP4 it drops
the global scale, and INT8 and MXFP8 it refuses: compressed_tensors_check.py covers these.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM
    import compressed_tensors  # noqa: F401, what transformers decodes them with
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

BYTES = 512
FORMATS = ["bf16", "fp8_tensor", "fp8_channel", "mxfp4", "int4:32", "int4:128"]
if importlib.util.find_spec("accelerate"):
    FORMATS.append("fp8_block")


def bits_per_byte(folder, text):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(list(text))[None]
    loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:])
    return loss.item() / math.log(2)


def check(shunt, model, fmt, folder):
    out = os.path.join(folder, fmt.replace(":", "_"))
    subprocess.run([shunt, "convert", model, out, "--to", fmt], check=True, capture_output=True)
    said = subprocess.run([shunt, "eval", out, "--tokens", str(BYTES), "--json"],
                          check=True, capture_output=True, text=True)
    ours = json.loads(said.stdout)["rows"][0]["bits_per_byte"]
    with open(os.path.join(model, "heldout.txt"), "rb") as file:
        theirs = bits_per_byte(out, file.read(BYTES))
    # They decode to bf16.
    assert abs(ours - theirs) <= 2e-3, (fmt, ours, theirs)
    print(f"{fmt}: {ours:.4f} bits a byte, {theirs:.4f} by transformers")


def main():
    shunt, model = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for fmt in FORMATS:
            check(shunt, model, fmt, folder)


if __name__ == "__main__":
    main()
