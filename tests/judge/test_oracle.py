"""Tests of the oracle, which gives the logits of transformers for every kind of target."""

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
def test_stepwise_logits_equal_those_of_one_forward(tiny_checkpoint: Maker, family: str) -> None:
    oracle = Oracle(get_module(load_decoder(tiny_checkpoint(family), name="target")))
    source = oracle.self_source(TEXT)
    assert (source is not None) == (family in ("t5", "bart"))
    at_once = oracle.logits(TEXT, source, len(TEXT))
    alone = torch.stack(list(oracle.stepwise_logits(TEXT, source)))
    torch.testing.assert_close(alone, at_once, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(oracle.logits(TEXT, source, 2), at_once[-2:])
    found = measure_tolerance(oracle.module, [TEXT])
    assert 0 < found.largest < found.ceiling


def test_images_change_the_logits(tiny_checkpoint: Maker) -> None:
    oracle = Oracle(get_module(load_decoder(tiny_checkpoint("llava"), name="target")))
    text, pixels = [5, 196, 196, 196, 196, 7], torch.rand(1, 3, 8, 8)
    with_image = oracle.logits(text, ExtraInput(images={"pixel_values": pixels}), 1)
    assert not torch.allclose(with_image, oracle.logits(text, None, 1), atol=1e-3)


@pytest.fixture(params=["mamba2", "t5"])
def outputs_and_judge(request: pytest.FixtureRequest, tiny_checkpoint: Maker) -> Any:
    """A request, the outputs of vanilla and sps, the steps of sps, a judge, and the target."""
    target = load_decoder(tiny_checkpoint(request.param), name="target")
    draft = load_decoder(tiny_checkpoint(request.param, noise=0.1), name="draft")
    workspace = Workspace({"target": target, "draft": draft}, 64)
    request_of_prompt = Request.create(target, "a", 1, TEXT, StopRule(frozenset(), 20))
    steps, outputs = Steps(), []
    for method in (Vanilla(), Sps()):
        session = Session(workspace, request_of_prompt, Sampling())
        for step in method.generate(session):
            if isinstance(method, Sps):
                steps.nodes.append(step.draft.nodes)
                steps.committed.append(len(step.outcome.committed))
        outputs.append(list(session.output()))
    judge = OutputJudge(lambda: get_module(target), Sampling(), lambda: [TEXT], target)
    return request_of_prompt, outputs, steps, judge, target


def test_a_wrong_token_is_a_mismatch_with_its_gap(outputs_and_judge: Any) -> None:
    request_of_prompt, (reference, drafted), steps, judge, _ = outputs_and_judge
    assert judge.compare(request_of_prompt, reference, drafted, steps).kind == "identical"
    assert max(judge.gaps(request_of_prompt, reference)) <= 1e-4
    wrong = [*reference[:4], (reference[4] + 1) % 197, *reference[5:]]
    verdict = judge.compare(request_of_prompt, reference, wrong, steps)
    assert (verdict.kind, verdict.position) == ("mismatch", 4)
    assert verdict.gap > 1e-2


def test_log_probs_equal_those_of_transformers(outputs_and_judge: Any) -> None:
    request_of_prompt, (reference, _), _, judge, target = outputs_and_judge
    sampling = Sampling("rejection", 1.0)
    transformers_log_probs = (
        OutputJudge(lambda: get_module(target), sampling, lambda: [TEXT])
        .compute_likelihood(request_of_prompt, reference)
        .log_probs
    )
    assert judge.compute_likelihood(request_of_prompt, reference).log_probs == pytest.approx(
        transformers_log_probs, abs=1e-4
    )


def test_output_is_reproduced_with_the_block_widths_of_the_method(outputs_and_judge: Any) -> None:
    request_of_prompt, (_, drafted), steps, _, target = outputs_and_judge
    assert width_explains(target, Sampling(), request_of_prompt, drafted, steps)
    wrong = [*drafted[:-1], (drafted[-1] + 1) % 197]
    assert not width_explains(target, Sampling(), request_of_prompt, wrong, steps)
