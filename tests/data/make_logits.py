#!/usr/bin/env python3
"""Makes tests/data/logits: what transformers computes, in f32, with whole language models.

  <model>.safetensors   `tokens` [S, T] i32 (some sequences, each alone) and `logits` [S, T, V] f32;
                        tiny_moe also `bits_per_byte` f64 [3]: context, stride, and what the first
                        4096 bytes of its text cost in windows of these (src/eval/bits_per_byte.hpp)

  pip install torch transformers==5.17.0 safetensors
  ./make_logits.py
"""

import math
import os

import torch
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
MODELS = {
    "tiny_moe": os.path.join(ROOT, "models", "tiny-moe"),
    "mixtral": os.path.join(HERE, "goldens", "mixtral"),
    "qwen2_moe": os.path.join(HERE, "goldens", "qwen2_moe"),
    "qwen3_moe": os.path.join(HERE, "goldens", "qwen3_moe"),
}


def bits_per_byte(model, text, context, stride):
    bits, scored, begin = 0.0, 1, 0
    while scored < len(text):
        end = min(begin + context, len(text))
        scores = torch.log_softmax(model(text[begin:end][None]).logits[0].double(), -1)
        at = torch.arange(scored, end)
        bits -= scores[at - begin - 1, text[at]].sum().item() / math.log(2)
        scored, begin = end, begin + stride
    return bits / (len(text) - 1)


@torch.no_grad()
def main():
    os.makedirs(os.path.join(HERE, "logits"), exist_ok=True)
    for name, folder in MODELS.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager").eval()
        if name == "tiny_moe":
            with open(os.path.join(folder, "heldout.txt"), "rb") as file:
                text = torch.tensor(list(file.read()))
            tokens = text[1000:1320].reshape(2, 160)
        else:
            generator = torch.Generator().manual_seed(7)
            tokens = torch.randint(0, model.config.vocab_size, (2, 100), generator=generator)
        out = {"tokens": tokens.int(), "logits": model(tokens).logits.contiguous()}
        if name == "tiny_moe":
            cost = bits_per_byte(model, text[:4096], 512, 256)
            out["bits_per_byte"] = torch.tensor([512, 256, cost], dtype=torch.float64)
            print(name, cost)
        save_file(out, os.path.join(HERE, "logits", name + ".safetensors"),
                  {"transformers": transformers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
