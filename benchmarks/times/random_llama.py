"""Write a Llama with random weights, to measure costs at sizes that are not available.

    python benchmarks/times/random_llama.py random-7b 4096 11008 32 32 32  # as Llama-2-7B
    python benchmarks/times/random_llama.py random-68m 768 3072 2 12 12      # as Llama-68M

Both have the tokenizer of the embedded models, so one can draft for the other. Their output is
meaningless, and nearly every draft is rejected.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_cli.models.resolve import resolve

VOCABULARY = 32_000
"""Vocabulary size of Llama-2. The tokenizer uses the first 4,096 ids."""


def main() -> None:
    """Write the checkpoint in half precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    for size in ("hidden", "mlp", "layers", "heads", "kv_heads"):
        parser.add_argument(size, type=int)
    sizes = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=4096,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(sizes.out)
    for file in resolve("embedded-7m").path.glob("tokenizer*"):
        shutil.copy(file, sizes.out)


if __name__ == "__main__":
    main()
