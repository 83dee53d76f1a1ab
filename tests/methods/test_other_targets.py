"""Targets that are not dense decoders: vanilla and `sps` emit the tokens of transformers'
module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from methods.sps import Sps
from methods.vanilla import Vanilla
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ExtraInput, Step
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.judge.oracle import Oracle

Maker = Callable[..., Path]
BUDGET = 24
CLEAR = 1e-3
"""A choice with a larger margin does not depend on the order of summation."""

SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling("coupled", 0.8, top_k=24, seed=3)}
FAMILIES = ("mixtral", "mamba2", "t5", "llava")
OTHERS = {"mixtral": "mamba2", "mamba2": "gpt2", "t5": "llama", "llava": "mamba2"}
"""Drafts of another kind than the target."""

IMAGE = 196


@dataclass
class Case:
    """A request, and what plain decoding answers: the ids, and the least margin of a choice."""

    request: Callable[..., Request]
    ids: list[int]
    margin: float


def prompt_of(family: str, n: int) -> tuple[tuple[int, ...], ExtraInput | None]:
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(2, 190, (n,), generator=generator).tolist()
    if family != "llava":
        return (*ids, *ids[: n // 2]), None
    pixels = torch.rand(1, 3, 8, 8, generator=generator)
    return (*ids, *[IMAGE] * 4, *ids[: n // 2]), ExtraInput(images={"pixel_values": pixels})


def plain(module: Any, request: Request, sampling: Sampling) -> tuple[list[int], float]:
    """Decode with transformers' module and warpers, without a cache and without our code."""
    oracle, text, margin = Oracle(module), list(request.ids), float("inf")
    noise = Noise(sampling.seed, request.prompt_id, request.turn, 197, torch.device("cpu"))
    for position in range(BUDGET):
        scores: Tensor = oracle.logits(text, request.source, 1)
        if sampling.rule == "coupled":
            scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
            scores = scores.log_softmax(-1) + noise.rows(position, 1)
        best, second = scores[0].topk(2).values.tolist()
        margin = min(margin, best - second)
        text.append(int(scores.argmax()))
    return text[len(request.ids) :], margin


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Maker) -> Callable[[str], Decoder]:
    return cache(lambda family: load_decoder(tiny_checkpoint(family), name="target"))


@pytest.fixture(scope="module")
def cases(target: Callable[[str], Decoder]) -> Callable[[str, str], list[Case]]:
    """Requests whose plain answer has no near-tie."""

    @cache
    def make(family: str, rule: str) -> list[Case]:
        return list(found(family, SAMPLINGS[rule]))

    def found(family: str, sampling: Sampling) -> Iterator[Case]:
        decoder = target(family)
        for n in (1, 2, 5, 9, 14, 23):
            ids, source = prompt_of(family, n)

            def request(
                eos: tuple[int, ...] = (), budget: int = BUDGET, n=n, ids=ids, source=source
            ) -> Request:
                stop = StopRule(frozenset(eos), budget)
                made = Request.create(decoder, f"{family}/{n}", 1, ids, stop)
                return made if source is None else Request(f"{family}/{n}", 1, ids, stop, source)

            case = Case(request, *plain(get_module(decoder), request(), sampling))
            if case.margin > CLEAR:
                yield case

    return make


def decode(
    method: Any, workspace: Workspace, request: Request, rule: str
) -> tuple[Any, list[Step]]:
    session = Session(workspace, request, SAMPLINGS[rule])
    return session, list(method.generate(session))


@pytest.mark.parametrize("rule", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_vanilla_and_sps_emit_transformers_tokens(
    tiny_checkpoint: Maker,
    target: Callable[[str], Decoder],
    cases: Callable[[str, str], list[Case]],
    family: str,
    rule: str,
) -> None:
    near = load_decoder(tiny_checkpoint(family, noise=0.1), name="draft")
    other = load_decoder(tiny_checkpoint(OTHERS[family], seed=5), name="draft")
    workspaces = [Workspace({"target": target(family), "draft": d}, 96) for d in (near, other)]
    found = cases(family, rule)
    assert len(found) >= 4
    accepted = 0
    for turn, case in enumerate(found):
        eos = () if turn % 2 else (case.ids[4 + turn % 7],)
        end = case.ids.index(eos[0]) + 1 if eos else BUDGET
        budget = (BUDGET, 7, 2, BUDGET)[turn % 4]
        due = case.ids[: min(end, budget)]
        for method, workspace in ((Vanilla(), workspaces[0]), *((Sps(), w) for w in workspaces)):
            session, steps = decode(method, workspace, case.request(eos, budget), rule)
            assert list(session.output()) == due
            assert session.finish == ("eos" if eos and end <= budget else "length")
            accepted += sum(len(step.outcome.path) for step in steps)
    assert accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_generate_says_the_same(
    target: Callable[[str], Decoder], cases: Callable[[str, str], list[Case]], family: str
) -> None:
    module = get_module(target(family))
    for case in cases(family, "greedy"):
        request = case.request()
        source = request.source or ExtraInput()
        read = torch.tensor([source.ids or request.ids])
        ids = module.generate(
            read,
            attention_mask=torch.ones_like(read),
            max_new_tokens=BUDGET,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            # transformers 5 makes a T5 cache as deep as the encoder, which here is less deep.
            use_cache=family != "t5",
            **source.images,
        )
        assert ids[0, len(request.ids) :].tolist() == case.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_draft_is_accepted_whole(
    tiny_checkpoint: Maker,
    target: Callable[[str], Decoder],
    cases: Callable[[str, str], list[Case]],
    family: str,
) -> None:
    twin = load_decoder(tiny_checkpoint(family), name="draft")
    twins = Workspace({"target": target(family), "draft": twin}, 96)
    for case in cases(family, "greedy"):
        _, steps = decode(Sps(Sps.Params(length=4)), twins, case.request(), "greedy")
        assert [len(step.outcome.committed) for step in steps[:-1]] == [5] * (len(steps) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_draws_no_token_of_probability_zero(
    tiny_checkpoint: Maker, target: Callable[[str], Decoder], family: str
) -> None:
    draft = load_decoder(tiny_checkpoint(family, noise=0.1), name="draft")
    workspace = Workspace({"target": target(family), "draft": draft}, 96)
    ids, source = prompt_of(family, 5)
    request = Request.create(target(family), "a", 1, ids, StopRule(frozenset(), BUDGET))
    if source is not None:
        request = Request("a", 1, ids, request.stop, source)
    session = Session(workspace, request, Sampling("rejection", 0.8, top_k=3))
    list(Sps().generate(session))
    text = [*request.ids, *session.output()]
    rows = Oracle(get_module(target(family))).logits(text[:-1], request.source, BUDGET)
    best = rows.topk(3).indices.tolist()
    assert all(token in row for token, row in zip(session.output(), best, strict=True))
