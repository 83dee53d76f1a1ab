"""What outputs are judged by reads every kind of target as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.sps import Sps
from methods.vanilla import Vanilla
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ExtraInput
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.judge.neartie import width_explains
from specbench_cli.judge.oracle import Oracle
from specbench_cli.judge.tolerance import measure_tolerance
from specbench_cli.judge.verdict import OutputJudge
from specbench_cli.store.schema import Steps

Maker = Callable[..., Path]
FAMILIES = ("mamba2", "mamba", "t5", "bart", "llava", "mixtral")
TEXT = [5, 9, 14, 3, 22, 7, 31]


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_is_all_at_once(tiny_checkpoint: Maker, family: str) -> None:
    oracle = Oracle(get_module(load_decoder(tiny_checkpoint(family), name="target")))
    source = oracle.self_source(TEXT)
    assert (source is not None) == (family in ("t5", "bart"))
    at_once = oracle.logits(TEXT, source, len(TEXT))
    alone = torch.stack(list(oracle.stepwise_logits(TEXT, source)))
    torch.testing.assert_close(alone, at_once, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(oracle.logits(TEXT, source, 2), at_once[-2:])
    found = measure_tolerance(oracle.module, [TEXT])
    assert 0 < found.largest < found.ceiling


def test_images_are_part_of_what_is_read(tiny_checkpoint: Maker) -> None:
    oracle = Oracle(get_module(load_decoder(tiny_checkpoint("llava"), name="target")))
    text, pixels = [5, 196, 196, 196, 196, 7], torch.rand(1, 3, 8, 8)
    with_image = oracle.logits(text, ExtraInput(images={"pixel_values": pixels}), 1)
    assert not torch.allclose(with_image, oracle.logits(text, None, 1), atol=1e-3)


@pytest.fixture(params=["mamba2", "t5"])
def decoded(request: pytest.FixtureRequest, tiny_checkpoint: Maker) -> Any:
    """What vanilla and sps say of a prompt, the steps of sps, and a judge."""
    target = load_decoder(tiny_checkpoint(request.param), name="target")
    draft = load_decoder(tiny_checkpoint(request.param, noise=0.1), name="draft")
    workspace = Workspace({"target": target, "draft": draft}, 64)
    asked = Request.create(target, "a", 1, TEXT, StopRule(frozenset(), 20))
    steps, outputs = Steps(), []
    for method in (Vanilla(), Sps()):
        session = Session(workspace, asked, Sampling())
        for step in method.generate(session):
            if isinstance(method, Sps):
                steps.nodes.append(step.draft.nodes)
                steps.committed.append(len(step.outcome.committed))
        outputs.append(list(session.output()))
    judge = OutputJudge(lambda: get_module(target), Sampling(), lambda: [TEXT], target)
    return asked, outputs, steps, judge, target


def test_a_wrong_token_is_told_by_its_gap(decoded: Any) -> None:
    asked, (reference, drafted), steps, judge, _ = decoded
    assert judge.compare(asked, reference, drafted, steps).kind == "identical"
    assert max(judge.gaps(asked, reference)) <= 1e-4
    wrong = [*reference[:4], (reference[4] + 1) % 197, *reference[5:]]
    verdict = judge.compare(asked, reference, wrong, steps)
    assert (verdict.kind, verdict.position) == ("mismatch", 4)
    assert verdict.gap > 1e-2


def test_own_and_transformers_log_probabilities_agree(decoded: Any) -> None:
    asked, (reference, _), _, judge, target = decoded
    drawing = Sampling("rejection", 1.0)
    theirs = (
        OutputJudge(lambda: get_module(target), drawing, lambda: [TEXT])
        .compute_likelihood(asked, reference)
        .log_probs
    )
    assert judge.compute_likelihood(asked, reference).log_probs == pytest.approx(theirs, abs=1e-4)


def test_blocks_as_wide_as_the_methods_choose_its_output(decoded: Any) -> None:
    asked, (_, drafted), steps, _, target = decoded
    assert width_explains(target, Sampling(), asked, drafted, steps)
    wrong = [*drafted[:-1], (drafted[-1] + 1) % 197]
    assert not width_explains(target, Sampling(), asked, wrong, steps)
