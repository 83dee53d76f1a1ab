"""Rotary scaling that changes with text length: transformers' values up to that length, and no
positions beyond it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from specbench_cli.engine.models.checkpoint import read_checkpoint_facts, read_config, rotary_limit
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.models.transformers_decoder import cache_argument
from specbench_cli.engine.types import Tokens

Maker = Callable[..., Path]
LIMIT = 24
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, *range(3, 17, 2)]}
GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-longrope": (
        "llama",
        {
            "rope_parameters": {
                **LONG,
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": LIMIT,
            }
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "num_key_value_heads": 4,
            "original_max_position_embeddings": LIMIT,
            "rope_parameters": {**LONG, "rope_theta": 1e4, "original_max_position_embeddings": 24},
        },
    ),
    "llama-dynamic": (
        "llama",
        {
            "max_position_embeddings": LIMIT,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}
IDS = torch.randint(0, 197, (1, LIMIT), generator=torch.Generator().manual_seed(3))


def token_by_token(folder: Path) -> Tensor:
    """Return transformers' logits of a text that it reads as `generate` does."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    name = cache_argument(inspect.signature(module.forward).parameters)
    cache = {name: DynamicCache(config=module.config)}
    with torch.inference_mode():
        found = [module(part, **cache, use_cache=True).logits for part in IDS.split(1, 1)]
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("parts", [[1] * LIMIT, [LIMIT], [9, 1, 7, 7]], ids=["one", "whole", "few"])
def test_forwards_of_any_length_give_what_token_by_token_gives(
    tiny_checkpoint: Maker, kind: str, parts: list[int]
) -> None:
    family, config = GROWING[kind]
    folder = tiny_checkpoint(family, **config)
    decoder = load_decoder(folder, name="target")
    assert decoder.max_positions == LIMIT
    state = decoder.new_state(LIMIT)
    outs = [decoder.forward(Tokens(p), state, logits_at="all").rows for p in IDS.split(parts, 1)]
    torch.testing.assert_close(torch.cat(outs), token_by_token(folder)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", GROWING)
def test_a_draft_beyond_the_limit_changes_nothing_before_it(
    tiny_checkpoint: Maker, kind: str
) -> None:
    family, config = GROWING[kind]
    folder = tiny_checkpoint(family, **config)
    decoder = load_decoder(folder, name="target")
    state = decoder.new_state(LIMIT + 8)
    at, n = LIMIT - 4, 8  # four rows of the text and a branch that ends beyond the limit
    decoder.forward(Tokens(IDS[:, :at]), state)
    drafted = torch.cat((IDS[:, at:], IDS[:, :4]), 1)
    positions = torch.arange(at, at + n)[None]
    out = decoder.forward(Tokens(drafted), state, positions=positions, logits_at="all")
    expected = token_by_token(folder)[0]
    torch.testing.assert_close(out.rows[:4], expected[at:], rtol=0, atol=1e-4)
    state.commit(0, range(LIMIT))
    state.rollback(0, 5)  # after the rejected draft the logits are as before
    rest = decoder.forward(Tokens(IDS[:, 5:]), state, logits_at="all").rows
    torch.testing.assert_close(rest, expected[5:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", GROWING)
def test_facts_and_module_have_the_same_limit(tiny_checkpoint: Maker, kind: str) -> None:
    family, config = GROWING[kind]
    folder = tiny_checkpoint(family, **config)
    decoder = load_decoder(folder, name="target")
    assert read_checkpoint_facts(folder).max_positions == LIMIT
    assert kind.rpartition("-")[2] in decoder.limit
    with torch.inference_mode():
        logits = get_module(decoder)(IDS).logits
    torch.testing.assert_close(logits, token_by_token(folder), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": LIMIT,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_constant_scaling_has_no_limit(tiny_checkpoint: Maker, rope: dict[str, Any]) -> None:
    folder = tiny_checkpoint("llama", rope_parameters={"rope_theta": 1e4, **rope})
    assert rotary_limit(read_config(folder)) is None
    assert read_checkpoint_facts(folder).max_positions == 256


def test_rotary_parameters_per_layer_type_are_checked(tiny_checkpoint: Maker) -> None:
    config = read_config(tiny_checkpoint("gemma3"))
    assert rotary_limit(config) is None
    config.rope_parameters["full_attention"] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": LIMIT,
    }
    found = rotary_limit(config)
    assert found is not None
    assert (found.kind, found.positions) == ("longrope", LIMIT)
