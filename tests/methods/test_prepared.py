"""Methods whose draft prepares windows for several outcomes: `mirror` and `ssd`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from methods.mirror import Mirror, MirrorParams
from methods.sps import Sps, SpsParams
from methods.ssd import Ssd, SsdParams
from specbench_cli.audit.cases import Case, make_sampling, random_cases
from specbench_cli.audit.models.table import (
    TableDecoder,
    fix_token,
    make_exit_table,
    make_table_pair,
)
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import ModelOutput, Step, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.engine.workspace import Workspace
from tests.methods.exact import distance_from_target

RULES = ("greedy", "coupled", "rejection")
EVERY_RULE = pytest.mark.parametrize("rule", RULES)
BOTH = pytest.mark.parametrize("name", ["mirror", "ssd"])


def method(name: str, length: int = 4, width: int = 2) -> Any:
    if name == "mirror":
        return Mirror(MirrorParams(length=length, candidates=width))
    return Ssd(SsdParams(length=length, guesses=width))


def counts(step: Step) -> tuple[Any, ...]:
    """Return what each step did, and its forwards. The first step includes the drafter's
    prefill."""
    forwards = [(f.model, f.role, f.n_tokens) for f in step.forwards if f.role != "prefill"]
    return step.draft.tokens.tolist(), step.outcome, sorted(forwards)


@BOTH
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_without_guesses_it_is_sps_step_by_step(open_session: Any, name: str, rule: str) -> None:
    sampling = make_sampling(rule, 1)
    for prompt in (0, 7, 13):
        found = [
            list(map(counts, decoder.generate(open_session(prompt, sampling, budget=20))))
            for decoder in (Sps(SpsParams(length=4)), method(name, width=0))
        ]
        assert found[0] == found[1]


@BOTH
@EVERY_RULE
def test_with_attention_the_drafters_rows_equal_recomputation(
    open_session: Any, name: str, rule: str
) -> None:
    session, reused = open_session(13, make_sampling(rule, 0), budget=24), 0
    for step in method(name, width=4).generate(session):
        reused += step.extra["reused"]
        (worker,) = session.harness.workers
        ((decoder, state),) = worker.session.states
        n = state.length()
        fresh = decoder.new_state(n)
        decoder.forward(Tokens(torch.tensor([worker.session.text[:n]])), fresh, logits_at=None)
        for layer in range(decoder.n_layers):
            ours, due = (s.keys(layer)[:, :, :n] for s in (state, fresh))
            torch.testing.assert_close(ours, due, rtol=1e-4, atol=1e-5)
    assert reused


@BOTH
def test_reuse_does_not_change_any_window(name: str) -> None:
    """Guesses decide which windows are ready, not what is drafted."""
    for case in random_cases("greedy", 16, 4):
        steps = [
            [
                (s.draft.tokens.tolist(), s.outcome)
                for s in method(name, width=w).generate(case.open())
            ]
            for w in (0, 1, 5)
        ]
        assert steps[0] == steps[1] == steps[2]


@BOTH
def test_reused_missed_and_prepared_are_counted(name: str) -> None:
    case = Case("near", make_table_pair("near", 5), Sampling(), budget=30)
    first, *steps = method(name, length=3, width=1).generate(case.open())
    assert first.extra == {"prepared": 0, "reused": 0, "missed": 0}
    assert all(
        step.extra["reused"] + step.extra["missed"] == bool(step.draft.nodes) for step in steps
    )
    assert all(step.extra["prepared"] == 4 for step in steps[:3])


@BOTH
def test_the_output_has_the_targets_distribution_where_branches_were_drawn(name: str) -> None:
    """Windows of two, whose first tokens are drawn before the outcome is known. The draft is in
    doubt behind token 0 alone, so that all outcomes of chance can be walked."""
    target, draft = fix_token(make_table_pair("near"), (1, 0), 0)
    draft[:, 1:] = draft[:, 1:] * 60
    distribution = Sampling("rejection", 1.0, top_k=2)
    case = Case("near", (target, draft), distribution, prompt=(2, 1, 0), budget=6, length=4)
    assert distance_from_target(method(name, length=2, width=1), case) < 1e-9


class Sleepy(TableDecoder):
    """A table that sleeps before one forward in four, for up to 2 ms, as chance will have."""

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        if random.random() < 0.25:
            time.sleep(random.random() * 2e-3)
        return super().forward(*args, **kwargs)


@pytest.fixture(scope="module", params=["thread", "process"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    """Tables whose drafter works in another thread, where both sleep, or in another process."""
    target, draft = make_table_pair("near", 5)
    transport: Transport = ThreadTransport(timeout=20.0)
    recipe: Callable[[], Decoder] = partial(Sleepy, "draft", draft)
    if request.param == "process":  # which could not find `Sleepy`
        transport, recipe = ProcessTransport(timeout=20.0), partial(TableDecoder, "draft", draft)
    decoders = {"target": Sleepy("target", target, make_exit_table(target)), "draft": recipe()}
    workspace = Workspace(decoders, 64, decoder_factories={"draft": recipe}, transport=transport)
    yield workspace
    workspace.close()


@BOTH
def test_ids_and_counters_do_not_depend_on_timing(elsewhere: Workspace, name: str) -> None:
    for rule, turn in [(rule, turn) for rule in RULES for turn in (0, 1)]:
        case = Case("near", make_table_pair("near", 5), make_sampling(rule, turn), budget=17)
        due = [(s.outcome, s.extra) for s in method(name).generate(case.open())]
        for _ in range(4):
            session = case.open(elsewhere)
            found = [(s.outcome, s.extra) for s in method(name).generate(session)]
            session.harness.workers[0].drain()
            assert found == due


@BOTH
def test_the_output_does_not_depend_on_the_prepared_windows(open_session: Any, name: str) -> None:
    """Use a real model and several prompts, with different numbers of prepared windows."""
    for prompt in (2, 9, 20):
        outputs = []
        for width in (0, 1, 3):
            session = open_session(prompt, Sampling(), budget=24)
            list(method(name, width=width).generate(session))
            outputs.append(list(session.output()))
        assert outputs[0] == outputs[1] == outputs[2]
