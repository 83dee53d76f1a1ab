"""Forwards in two parts, with early logits from an exit layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_cli.audit.models.tiny import VOCAB, create_tiny_models
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.paused_forward import PausedForward
from specbench_cli.engine.types import Draft, Hidden, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree_mask
from specbench_cli.errors import MethodFault
from specbench_cli.store.schema import Trace
from tests.engine.models.feeding import some_ids

Maker = Callable[..., Path]
CLOSE = 1e-5
PARENTS = (-1, -1, 0, 0, 1, 2)
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "gpt2")
"""The first three families are fused. All of them also run through transformers' module."""


def metered(tiny_checkpoint: Maker, family: str, *, hosted: bool) -> Metered:
    decoder = load_decoder(tiny_checkpoint(family), name="target", host_module=hosted)
    return Metered(decoder, Meter(decoder.device), role="verify")


def shape(tree: bool, start: int) -> dict[str, Tensor]:
    if not tree:
        return {}
    mask, depths = build_tree_mask(PARENTS, torch.device("cpu"))
    return {"mask": mask, "positions": (depths + start)[None]}


MODELS = pytest.mark.parametrize(
    ("family", "hosted"), [("llama", False), ("qwen3", False), *((f, True) for f in FAMILIES)]
)


@MODELS
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_two_parts_equal_the_whole_forward_bit_for_bit(
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
        halves = PausedForward(target, halved)
        halves.begin(x, layer, **how)
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
def test_early_logits_are_the_exit_rows_through_the_models_output(
    tiny_checkpoint: Maker, family: str, hosted: bool
) -> None:
    target = metered(tiny_checkpoint, family, hosted=hosted)
    decoder, ids = target.decoder, some_ids(9)
    module = get_module(decoder)
    with torch.no_grad():
        left = module(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in range(1, target.n_layers):
        halted = PausedForward(target, target.new_state(9))
        halted.begin(Tokens(ids), layer)
        early = halted.early_logits
        due = decoder.unembed(decoder.norm(left[layer]))[0]
        assert float((early - due).abs().max()) <= CLOSE * max(1.0, float(due.abs().max()))


def test_an_exit_at_the_last_layer_is_the_whole_forward(tiny_checkpoint: Maker) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    halves = PausedForward(target, target.new_state(9))
    halves.begin(Tokens(some_ids(9)), target.n_layers)
    assert torch.equal(halves.end().logits[0], halves.early_logits)
    assert [forward.layers for forward in target._meter.forwards] == [(0, target.n_layers)]


def test_parts_are_metered_by_layers_and_captured_layers_come_from_both(
    tiny_checkpoint: Maker,
) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    n, captured_layers = target.n_layers, range(target.n_layers)
    whole = target.forward(
        Tokens(some_ids(9)), target.new_state(9), captured_layers=captured_layers
    )
    halves = PausedForward(target, target.new_state(9), captured_layers)
    halves.begin(Tokens(some_ids(9)), 1)
    found = halves.end().aux_hidden_states
    assert all(torch.equal(found[at], whole.aux_hidden_states[at]) for at in captured_layers)
    forwards: Any = target._meter.forwards[1:]
    assert [f.layers for f in forwards] == [(0, 1), (1, n)]
    assert [f.n_tokens for f in forwards] == [9, 9]


@pytest.mark.parametrize("layer", [0, -1, 99])
def test_an_exit_before_the_first_layer_is_refused(tiny_checkpoint: Maker, layer: int) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    with pytest.raises(MethodFault, match=r"cannot exit after -?\d+ layers: it has 3 layers"):
        PausedForward(target, target.new_state(4)).begin(Tokens(some_ids(3)), layer)


@pytest.mark.parametrize("parents", [None, (-1, -1, 0)], ids=["chain", "tree"])
def test_a_score_in_two_parts_equals_the_score(parents: tuple[int, ...] | None) -> None:
    found = []
    for halved in (False, True):
        session = create_tiny_models().open(5, Sampling())
        session.reserve(8)
        session.prefill()
        draft = Draft(torch.tensor([7, 8, 9]), parents)
        if halved:
            half = session.begin_score(draft, 1)
            assert half.early_logits.shape == (4, VOCAB)
        rows = half.end().rows if halved else session.score(draft)
        session.commit(session.verify(draft, rows))
        found.append((rows, session.tokens(), session.state.length(0, 1)))
    (whole, *rest), (halves, *as_well) = found
    assert torch.equal(whole, halves)
    assert rest == as_well


def test_a_started_score_must_be_completed() -> None:
    session = create_tiny_models().open(5, Sampling())
    session.prefill()
    half = session.begin_score(session.chain(()), 1)
    with pytest.raises(MethodFault, match="was called without logits"):
        half.exit_early(copy=False)
    half.end()
    for again in (half.end, half.exit_logits, lambda: half.exit_early(copy=False)):
        with pytest.raises(MethodFault, match="has already ended"):
            again()


# ---- forwards that end before the last layer ----------------------------------------------------


@MODELS
@pytest.mark.parametrize("stops", [(1, 2), (1,), (2,)])
def test_a_forward_in_many_parts_equals_the_whole_forward(
    tiny_checkpoint: Maker, family: str, hosted: bool, stops: tuple[int, ...]
) -> None:
    target = metered(tiny_checkpoint, family, hosted=hosted)
    ids = some_ids(12)
    whole, halting = target.new_state(20), target.new_state(20)
    for state in (whole, halting):
        target.forward(Tokens(ids[:, :11]), state, logits_at=None)
    due = target.forward(Tokens(ids[:, 11:]), whole, logits_at="all")
    halted = PausedForward(target, halting)
    halted.begin(Tokens(ids[:, 11:]), stops[0], early=False)
    assert [f.layers for f in target._meter.forwards[-1:]] == [(0, stops[0])]
    for layer in stops[1:]:
        halted.run_to(layer)
    assert torch.equal(halted.end().logits, due.logits)


@MODELS
@pytest.mark.parametrize("copy", [False, True], ids=["none", "copy"])
def test_skipped_layers_see_the_right_rows(
    tiny_checkpoint: Maker, family: str, hosted: bool, copy: bool
) -> None:
    """Token 11 exits at layer 1.

    In layer 2, token 12 then attends to the text without token 11, at unchanged positions. With
    `copy` it attends to the keys and values that layer 2 computes from token 11's layer 1 output.
    """
    target = metered(tiny_checkpoint, family, hosted=hosted)
    ids = some_ids(13)
    state, other = target.new_state(20), target.new_state(20)
    for each in (state, other):
        target.forward(Tokens(ids[:, :11]), each, logits_at=None)
        each.commit(0, range(11))
    halted = PausedForward(target, state)
    halted.begin(Tokens(ids[:, 11:12]), 1, early=False)
    halted.exit_logits()
    halted.exit_early(copy=copy)
    state.commit(0, (0,))
    lengths = [state.length(0, at) for at in range(target.n_layers)]
    assert lengths == [12] + [11 + copy] * (target.n_layers - 1)
    last = PausedForward(target, state)
    last.begin(Tokens(ids[:, 12:]), 2, early=False)
    found = last.end().logits
    # The same by hand: layer 1 over both tokens, the other layers one by one.
    first = target.forward(Tokens(ids[:, 11:]), other, layers=(0, 1), logits_at=None).hidden
    rows, positions = first[:, 1:].clone(), torch.tensor([[12]])
    for at in range(1, target.n_layers):
        if copy:
            target.forward(
                Hidden(first[:, :1].clone()), other, layers=(at, at + 1), logits_at=None,
                positions=torch.tensor([[11]]),
            )  # fmt: skip
        out = target.forward(
            Hidden(rows), other, layers=(at, at + 1), logits_at="all", positions=positions
        )
        rows = out.hidden.clone()
    assert torch.allclose(found, out.logits, atol=1e-5, rtol=1e-5)
    state.commit(0, (0,))
    state.rollback(0, 12)
    assert [state.length(0, at) for at in range(target.n_layers)] == lengths
    state.rollback(0, 11)
    assert {state.length(0, at) for at in range(target.n_layers)} == {11}


@MODELS
def test_some_early_logits_equal_those_of_all_rows(
    tiny_checkpoint: Maker, family: str, hosted: bool
) -> None:
    target = metered(tiny_checkpoint, family, hosted=hosted)
    halted = PausedForward(target, target.new_state(9))
    halted.begin(Tokens(some_ids(9)), 2, early=False)
    ids = torch.tensor([5, 1, 90, 7])
    assert torch.allclose(
        halted.early_logits_of(ids), halted.exit_logits()[:, ids], atol=1e-5, rtol=1e-5
    )


def test_an_early_exit_counts_as_a_forward_with_its_share(tiny_checkpoint: Maker) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    state = target.new_state(9)
    target.forward(Tokens(some_ids(5)), state)
    for copy in (False, True):
        halted = PausedForward(target, state)
        halted.begin(Tokens(some_ids(1)), 1, early=False)
        halted.run_to(2)
        halted.exit_logits()
        halted.exit_early(copy=copy)
    trace = Trace.pack(target._meter.forwards)
    assert trace.count_forwards()[0] == 3
    none, copied = target._meter.forwards[1:4], target._meter.forwards[4:]
    assert [f.layers for f in none] == [(0, 1), (1, 2), (3, 3)]
    assert [f.role for f in none] == ["verify"] * 3
    assert [(f.layers, f.role) for f in copied[3:]] == [((2, 3), "aux")]
    assert 0 < copied[3].share < target.share((2, 3), logits=False)
    assert sum(f.share for f in none) == pytest.approx(1 - target.share((2, 3), logits=False))


def test_a_paused_forward_does_not_go_back(tiny_checkpoint: Maker) -> None:
    target = metered(tiny_checkpoint, "llama", hosted=False)
    halted = PausedForward(target, target.new_state(9))
    halted.begin(Tokens(some_ids(4)), 2, early=False)
    with pytest.raises(MethodFault, match="has run 2 layers already and cannot go back to layer 1"):
        halted.run_to(1)


def test_an_early_exit_keeps_no_features() -> None:
    session = create_tiny_models().open(5, Sampling())
    session.capture_layers((0,))
    session.prefill()
    half = session.begin_score(session.chain(()), 1)
    half.exit_logits()
    with pytest.raises(MethodFault, match="features cannot be captured if a forward exits early"):
        half.exit_early(copy=False)
