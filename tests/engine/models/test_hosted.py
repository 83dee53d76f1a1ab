"""Models that run through transformers' own module give the module's logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.types import ExtraInput, Hidden, Tokens
from specbench_cli.errors import UsageError
from tests.engine.models.feeding import (
    CLOSE,
    check_tree_rows,
    check_two_sequences,
    logits,
    logits_with_rejections,
    own_logits,
    relative_difference,
    some_ids,
)

Maker = Callable[..., Path]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 7}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "llava": ("llava", {}),
    "qwen2 some windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "llama dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


def decoder_of(tiny_checkpoint: Maker, case: str) -> TransformersDecoder:
    family, overrides = CASES[case]
    decoder = load_decoder(tiny_checkpoint(family, **overrides), name="target", host_module=True)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tiny_checkpoint: Maker, case: str) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, case), some_ids(50)
    found = logits_with_rejections(decoder, ids, (24, 30, 38))
    assert relative_difference(found, own_logits(decoder, ids)) <= CLOSE


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt2", "phi3 window"])
def test_two_sequences_in_one_forward_equal_two_forwards(tiny_checkpoint: Maker, case: str) -> None:
    check_two_sequences(decoder_of(tiny_checkpoint, case), 5)


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "olmo2", "gpt2"])
def test_tree_rows_equal_plain_sequences(tiny_checkpoint: Maker, case: str) -> None:
    check_tree_rows(decoder_of(tiny_checkpoint, case))


def test_captured_layers_hidden_and_chosen_rows(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "olmo2"), some_ids(12)
    with torch.no_grad():
        own = decoder.module(input_ids=ids, output_hidden_states=True)
    rows = torch.tensor([3, 7])
    out = decoder.forward(
        Tokens(ids), decoder.new_state(12), captured_layers=(0, 1), logits_at=rows
    )
    assert relative_difference(out.logits, own.logits[:, rows]) <= CLOSE
    assert relative_difference(out.aux_hidden_states[0], own.hidden_states[1]) <= CLOSE
    assert relative_difference(out.aux_hidden_states[1], own.hidden_states[2]) <= CLOSE
    assert relative_difference(decoder.module.model.norm(out.hidden), own.hidden_states[3]) <= CLOSE
    last = decoder.forward(Tokens(ids), decoder.new_state(12))
    assert relative_difference(last.logits, own.logits[:, -1:]) <= CLOSE
    assert decoder.forward(Tokens(ids), decoder.new_state(12), logits_at=None).logits is None


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "phi3"])
@pytest.mark.parametrize(
    "skip", [(0,), (1,), (2,), (0, 2), ((1, "attention"), (1, "mlp"))], ids=str
)
def test_skipped_layers_have_no_effect(
    tiny_checkpoint: Maker, family: str, skip: tuple[Any, ...]
) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, family), some_ids(12)
    state, over = decoder.new_state(20), {at for at in range(3) if at in skip} or {1}
    found = [logits(decoder, ids[:, :8], state, skip=frozenset(skip))]
    found.append(logits(decoder, ids[:, 8:], state, skip=frozenset(skip)))
    module = copy.deepcopy(decoder.module)
    for at in over:
        layer = module.base_model.get_submodule("h" if family == "gpt2" else "layers")[at]
        in_tuples = decoder._returns_tuples
        layer.forward = lambda rows, *_, t=in_tuples, **__: (rows,) if t else rows
    with torch.no_grad():
        expected = module(input_ids=ids, use_cache=False).logits
    assert relative_difference(torch.cat(found, 1), expected) <= CLOSE * max(
        1.0, float(expected.abs().max())
    )
    assert [state.length(0, at) for at in range(3)] == [0 if at in over else 12 for at in range(3)]


def test_layers_that_run_have_equally_many_rows(tiny_checkpoint: Maker) -> None:
    decoder, state = decoder_of(tiny_checkpoint, "gpt2"), None
    state = decoder.new_state(20)
    logits(decoder, some_ids(4), state, skip=frozenset({1}))
    with pytest.raises(ValueError, match="must have the same number of rows"):
        logits(decoder, some_ids(1), state, skip=frozenset({2}))


def test_a_share_is_that_of_the_bytes_of_layers_and_output_matrix(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "gpt2")
    size = [sum(w.numel() for w in layer.parameters()) for layer in decoder.module.transformer.h]
    end = decoder.module.lm_head.weight.numel()
    assert decoder.share() == decoder.share((0, 3)) == 1
    assert decoder.share((0, 1)) == pytest.approx((size[0] + end) / (sum(size) + end))
    assert decoder.share(skip=frozenset({0, 2})) == decoder.share((1, 2))
    assert decoder.share((0, 1), logits=False) + decoder.share((1, 3)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"skip": frozenset({(1, "mlp")})}, "can skip layers but not sublayers"),
        ({"x": Hidden(torch.zeros(1, 2, 64))}, "input of layer 0 must be token ids"),
        ({"layers": (1, 3)}, "input of layer 1 must be hidden rows"),
    ],
)
def test_skipped_layers_and_rows_of_the_wrong_kind_are_refused(
    tiny_checkpoint: Maker, how: dict[str, Any], why: str
) -> None:
    decoder = decoder_of(tiny_checkpoint, "gpt2")
    arguments = {"x": Tokens(some_ids(2)), "state": decoder.new_state(4), **how}
    with pytest.raises(ValueError, match=why):
        decoder.forward(**arguments)


def test_more_rows_than_the_state_holds_are_refused(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "gpt2")
    with pytest.raises(ValueError, match="do not fit into a state of 4 rows"):
        logits(decoder, some_ids(5), decoder.new_state(4))


def test_model_that_needs_a_two_dimensional_mask_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    module = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(UsageError, match="bloom checkpoints cannot be decoded here"):
        TransformersDecoder(module.eval(), name="target")


# ---- images -------------------------------------------------------------------------------------

IMAGE = 196


def with_image(text: Tensor) -> Tensor:
    """Return a prompt with image placeholders."""
    text = text % IMAGE
    return torch.cat((text[:, :3], torch.full((1, 4), IMAGE), text[:, 3:]), 1)


def random_image(seed: int) -> ExtraInput:
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return ExtraInput(images={"pixel_values": pixels})


def test_images_are_read_with_the_prompt(tiny_checkpoint: Maker) -> None:
    decoder, ids, source = (
        decoder_of(tiny_checkpoint, "llava"),
        with_image(some_ids(16)),
        random_image(0),
    )
    with torch.no_grad():
        due = decoder.module(input_ids=ids, **source.images).logits
    state = decoder.new_state(24)
    assert decoder.attach(state, source)
    found = [logits(decoder, part, state) for part in ids.split((12, 1, 7), 1)]
    assert relative_difference(torch.cat(found, 1), due) <= CLOSE
    assert relative_difference(due, own_logits(decoder, ids)) > 100 * CLOSE
    state.clear()
    assert relative_difference(logits(decoder, ids, state), own_logits(decoder, ids)) <= CLOSE


def test_sequences_of_one_batch_have_their_own_images(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "llava")
    ids = torch.cat([with_image(some_ids(n)[:, :9]) for n in (16, 17)])
    together = decoder.new_state(24, n_seqs=2)
    for seq in range(2):
        decoder.attach(together, random_image(seq), seq)
    found = logits(decoder, ids, together)
    for seq in range(2):
        alone = decoder.new_state(24)
        decoder.attach(alone, random_image(seq))
        assert (
            relative_difference(found[seq], logits(decoder, ids[seq : seq + 1], alone)[0]) <= CLOSE
        )


def test_a_text_model_refuses_images(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "gpt2")
    assert not decoder.attach(decoder.new_state(4), random_image(0))


def test_a_family_with_unequal_image_features_is_refused(
    tiny_checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(tiny_checkpoint, "llava")
    read = decoder.module.model.get_placeholder_mask

    def once(*args: Any, **how: Any) -> Any:
        monkeypatch.setattr(decoder.module.model, "get_placeholder_mask", refuse)
        return read(*args, **how)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(decoder.module.model, "get_placeholder_mask", once)
    with pytest.raises(UsageError, match=r"llava models read no images here, only text.*\(no\)"):
        decoder.attach(decoder.new_state(4), random_image(0))
