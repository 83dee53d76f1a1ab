"""`mirror`: its early exit prepares windows, and influences nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.mirror import Mirror, MirrorParams
from methods.vanilla import Vanilla
from specbench_cli.audit.cases import make_sampling, random_cases
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.paused_forward import PausedForward
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

EVERY_RULE = pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])


def mirror(**params: Any) -> Mirror:
    return Mirror(MirrorParams(**{"length": 4, **params}))


def total(steps: Sequence[Step], what: str) -> int:
    return sum(step.extra[what] for step in steps)


def on_tables(rule: str, **params: Any) -> list[Step]:
    cases = random_cases(rule, 24, 4)
    return [step for case in cases for step in mirror(**params).generate(case.open())]


@EVERY_RULE
def test_with_every_token_a_candidate_every_window_is_reused(rule: str) -> None:
    steps = on_tables(rule, candidates=5)
    assert total(steps, "missed") == 0
    assert total(steps, "reused") > 20


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_an_exit_at_the_last_layer_guesses_every_outcome(rule: str) -> None:
    steps = on_tables(rule, candidates=1, layer=2)
    assert total(steps, "missed") == 0
    assert total(steps, "reused") > 20


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_wrong_early_exit_only_prevents_reuse(
    monkeypatch: pytest.MonkeyPatch, open_session: Any, rule: str
) -> None:
    def steps() -> list[tuple[Any, ...]]:
        sessions = (open_session(at, make_sampling(rule, 0), budget=24) for at in (2, 9, 13, 20))
        taken = (step for session in sessions for step in mirror().generate(session))
        return [(step.draft.tokens.tolist(), step.outcome, step.extra["reused"]) for step in taken]

    sound, early = steps(), PausedForward.early_logits.fget
    monkeypatch.setattr(PausedForward, "early_logits", property(lambda half: -early(half)))
    corrupted = steps()
    assert [step[:2] for step in corrupted] == [step[:2] for step in sound]
    assert sum(step[2] for step in corrupted) < sum(step[2] for step in sound) / 3


def test_the_targets_forwards_are_halves_of_whole_ones(open_session: Any) -> None:
    session = open_session(13, Sampling(), budget=20)
    steps = list(mirror().generate(session))
    target = [f for f in session.harness.meter.forwards if f.model == "target"]
    assert sum(f.layers[1] == 2 for f in target) == len(steps) + 1
    for step in steps:
        layers = [f.layers for f in step.forwards if f.model == "target"]
        assert layers == ([(0, 1), (1, 2)] if step.draft.nodes > 1 else [(0, 2)])


def test_a_layer_that_the_target_lacks_is_refused(open_session: Any) -> None:
    with pytest.raises(MethodFault, match="cannot exit after 3 layers: it has 2 layers"):
        list(mirror(layer=3).generate(open_session(13, Sampling(), budget=20)))


def agree(target: Decoder, draft: Decoder, vocab: int, rule: str, n: int = 32) -> int:
    """Windows reused where vanilla's output and `mirror`'s are compared."""
    workspace, reused = Workspace({"target": target, "draft": draft}, capacity=64), 0
    generator = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(5, vocab, (12,), generator=generator).tolist())
    outputs = []
    for method in (Vanilla(), mirror(candidates=3)):
        request = Request("some/0", 0, ids, StopRule(frozenset(), n))
        session = Session(workspace, request, make_sampling(rule, 0))
        reused += sum(step.extra.get("reused", 0) for step in method.generate(session))
        outputs.append(list(session.output()))
    assert outputs[0] == outputs[1]
    return reused


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_target_that_runs_through_transformers_exits_early_too(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    target, draft = (
        load_decoder(tiny_checkpoint(family, seed=seed), name=role)
        for seed, role in enumerate(("target", "draft"))
    )
    agree(target, target, 197, "greedy")
    agree(target, draft, 197, "coupled")
