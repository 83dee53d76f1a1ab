"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # A processor each: threads of two workers on the same ones would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# How long an example takes says how busy the machine is.
settings.register_profile("specbench", deadline=None)
settings.load_profile("specbench")

SIZES = {
    "vocab_size": 197,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
"""A model of 100,000 parameters with shared key and value heads."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 7}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    ),
}
"""Family -> transformers' config class and what its tiny model has of its own."""

TinyCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A maker of tiny random checkpoints as transformers writes them, each made once a session.

    `tiny_checkpoint(family, *, seed=0, dtype=torch.float32, shard=None, **config) -> folder`;
    `shard` is the largest size of a weight file ("100KB"), `config` overrides the family's
    configuration.
    """
    made: dict[str, Path] = {}

    def make(
        family: str,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        shard: str | None = None,
        **overrides: Any,
    ) -> Path:
        key = f"{family} {seed} {dtype} {shard} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            config_class, own = FAMILIES[family]
            sizes = SIZES
            if family == "gpt2":
                sizes = {key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
            transformers = importlib.import_module("transformers")
            config = getattr(transformers, config_class)(**(sizes | own | overrides))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = transformers.AutoModelForCausalLM.from_config(config)
                for (
                    weight
                ) in module.parameters():  # so that norms and biases matter, and logits spread
                    weight.data += 0.1 * torch.randn_like(weight)
            module.to(dtype).save_pretrained(folder, max_shard_size=shard or "1GB")
            made[key] = folder
        return made[key]

    return make
