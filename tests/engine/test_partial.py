"""A forward in two halves is the whole forward, and its early logits are the exit layer's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_cli.audit.models.tiny import VOCAB, tiny_models
from specbench_cli.engine.models.load import load_decoder, module_of
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.scoring import Halves
from specbench_cli.engine.types import Draft, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import rows_of
from specbench_cli.errors import MethodFault

Maker = Callable[..., Path]
CLOSE = 1e-5
PARENTS = (-1, -1, 0, 0, 1, 2)
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "gpt2")
"""The first three are fused; all of them run through transformers' module as well."""


def metered(tiny_checkpoint: Maker, family: str, *, hosted: bool) -> Metered:
    decoder = load_decoder(tiny_checkpoint(family), name="target", host_module=hosted)
    return Metered(decoder, Meter(decoder.device), role="verify")


def some_ids(n: int) -> Tensor:
    return torch.randint(0, 197, (1, n), generator=torch.Generator().manual_seed(n))


def shape(tree: bool, start: int) -> dict[str, Tensor]:
    if not tree:
        return {}
    mask, depths = rows_of(PARENTS, torch.device("cpu"))
    return {"mask": mask, "positions": (depths + start)[None]}


MODELS = pytest.mark.parametrize(
    ("family", "hosted"), [("llama", False), ("qwen3", False), *((f, True) for f in FAMILIES)]
)


@MODELS
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_two_halves_are_the_whole_forward_bit_for_bit(
    tiny_checkpoint: Maker, family: str, hosted: bool, tree: bool
) -> None:
    target = metered(tiny_checkpoint, family, hosted=hosted)
    ids, how = some_ids(18), shape(tree, 11)
    x = Tokens(ids[:, 11:])
    whole, halved = target.new_state(40), target.new_state(40)
    for state in (whole, halved):
        target.forward(Tokens(ids[:, :11]), state, logits_at=None)
        state.commit(0, range(11))
    due = target.forward(x, whole, logits_at="all", **how)
    for layer in range(1, target.n_layers + 1):
        halves = Halves(target, halved, layer)
        halves.begin(x, **how)
        ran = [halved.length(0, at) for at in range(target.n_layers)]
        assert ran == [18] * layer + [11] * (target.n_layers - layer)
        out = halves.end()
        assert torch.equal(out.logits, due.logits)
        assert torch.equal(out.hidden, due.hidden)
        for at in range(target.n_layers):
            assert halved.length(0, at) == 18
            assert torch.equal(halved.keys(at)[:, :, :18], whole.keys(at)[:, :, :18])
            assert torch.equal(halved.values(at)[:, :, :18], whole.values(at)[:, :, :18])
        halved.rollback(0, 11)


@MODELS
def test_early_logits_are_the_exit_rows_through_the_models_own_end(
    tiny_checkpoint: Maker, family: str, hosted: bool
) -> None:
    target = metered(tiny_checkpoint, family, hosted=hosted)
    decoder, ids = target.decoder, some_ids(9)
    module = module_of(decoder)
    with torch.no_grad():
        left = module(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in range(1, target.n_layers):
        early = Halves(target, target.new_state(9), layer).begin(Tokens(ids))
        due = decoder.unembed(decoder.norm(left[layer]))[0]
        assert float((early - due).abs().max()) <= CLOSE * max(1.0, float(due.abs().max()))


def test_exit_at_the_last_layer_is_the_whole_forward_at_once(tiny_checkpoint: Maker) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    halves = Halves(target, target.new_state(9), target.n_layers)
    early = halves.begin(Tokens(some_ids(9)))
    assert torch.equal(halves.end().logits[0], early)
    assert [forward.layers for forward in target._meter.forwards] == [(0, target.n_layers)]


def test_halves_are_metered_by_their_layers_and_taps_come_from_both(
    tiny_checkpoint: Maker,
) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    n, taps = target.n_layers, range(target.n_layers)
    whole = target.forward(Tokens(some_ids(9)), target.new_state(9), taps=taps)
    halves = Halves(target, target.new_state(9), 1, taps)
    halves.begin(Tokens(some_ids(9)))
    found = halves.end().taps
    assert all(torch.equal(found[at], whole.taps[at]) for at in taps)
    forwards: Any = target._meter.forwards[1:]
    assert [f.layers for f in forwards] == [(0, 1), (1, n)]
    assert [f.n_tokens for f in forwards] == [9, 9]


@pytest.mark.parametrize("layer", [0, -1, 99])
def test_an_exit_behind_no_layer_is_refused(tiny_checkpoint: Maker, layer: int) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    with pytest.raises(MethodFault, match=r"no exit behind layer -?\d+: it has 3 layers"):
        Halves(target, target.new_state(4), layer)


@pytest.mark.parametrize("parents", [None, (-1, -1, 0)], ids=["chain", "tree"])
def test_a_score_in_two_halves_is_the_score(parents: tuple[int, ...] | None) -> None:
    found = []
    for halved in (False, True):
        session = tiny_models().open(5, Sampling())
        session.reserve(8)
        session.prefill()
        draft = Draft(torch.tensor([7, 8, 9]), parents)
        if halved:
            assert session.begin_score(draft, 1).shape == (4, VOCAB)
        rows = session.end_score() if halved else session.score(draft)
        session.commit(session.verify(draft, rows))
        found.append((rows, session.tokens(), session.state.length(0, 1)))
    (whole, *rest), (halves, *as_well) = found
    assert torch.equal(whole, halves)
    assert rest == as_well


def test_a_score_ends_once_it_was_begun() -> None:
    session = tiny_models().open(5, Sampling())
    session.prefill()
    with pytest.raises(MethodFault, match="nothing was begun"):
        session.end_score()
