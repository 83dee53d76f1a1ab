"""PEARL: its states, and the faults of the published code that it does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from methods.pearl import Pearl, PearlParams
from methods.vanilla import Vanilla
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import find_wrong_rows, make_table_pair
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.sampling import Sampling

RULES = (Sampling(), Sampling("coupled", 1.0, seed=1), Sampling("rejection", 1.0, seed=1))
SAMPLED = RULES[2]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def steps_of(session: ObservedSession, window: int | str) -> list[Step]:
    return list(Pearl(PearlParams(window=window)).generate(session))


def committed(steps: list[Step]) -> list[int]:
    return [len(step.outcome.committed) for step in steps]


def constant(distribution: list[float]) -> Tensor:
    """Return a table with the same distribution after every text."""
    v = len(distribution)
    return torch.tensor(distribution, dtype=torch.float64).log().expand(v, v, v).clone()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_draft_equal_to_the_target_commits_one_token_and_then_a_window_per_step(rule, window):
    case = Case("equal", make_table_pair("equal", 5), rule, budget=2 + 4 * window)
    steps = steps_of(case.open(), window)
    assert committed(steps) == [1, *[window] * 4]
    assert [step.draft.nodes for step in steps if step.draft] == committed(steps)
    assert not any("bonus" in step.outcome.origin for step in steps)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
@pytest.mark.parametrize("window", [1, 4])
def test_a_draft_that_is_never_right_costs_only_its_own_time(rule, window):
    case = Case("disjoint", make_table_pair("disjoint", 6), rule, prompt=(1, 0), budget=12)
    steps = steps_of(case.open(), window)
    assert committed(steps) == [1] * 11
    assert all(step.draft is not None and step.draft.nodes == 1 for step in steps)  # none pending


@pytest.mark.parametrize("budget", range(1, 12))
def test_unverified_tokens_are_never_returned(budget):
    """The published code stops in the midst of its pending tokens and returns them. Here the draft
    is right up to a token that it cannot know, so that an unverified one is a wrong one."""
    target = constant([0.5, 0.5, 0.0, 0.0])
    draft = constant([0.0, 0.0, 0.5, 0.5])
    target[:, 0], target[:, 1] = constant([0, 1, 0, 0])[0, 0], constant([1, 0, 0, 0])[0, 0]
    draft[:, 0], draft[:, 1] = target[:, 0], constant([0, 0, 1, 0])[0, 0]
    case = Case("known", (target, draft), Sampling(), prompt=(0, 1), budget=budget)
    session = case.open()
    steps = steps_of(session, 4)
    assert session.output() == [turn % 2 for turn in range(budget)]
    for step in steps:
        drafted = step.draft.tokens.tolist() if step.draft else []
        accepted = step.outcome.committed[: step.outcome.origin.count("accepted")]
        assert list(accepted) == drafted[: len(accepted)] and step.outcome.tested >= len(accepted)


def test_windows_end_with_the_budget():
    """A token is useless if it cannot be committed after all tokens before it."""
    for budget in range(2, 12):
        session = Case("equal", make_table_pair("equal", 5), Sampling(), budget=budget).open()
        steps = steps_of(session, 4)
        drafted = sum(f.n_tokens for f in session.harness.meter.forwards if f.role == "draft")
        assert drafted <= budget and len(session.output()) == budget
        assert all(step.draft is not None and step.draft.levels <= 4 for step in steps)


class Log:
    """Random source that records which number each acceptance test used."""

    def __init__(self, random: Any) -> None:
        self.random, self.tests, self.numbers = random, 0, []
        self.categorical = random.categorical

    def bernoulli(self, a: Tensor) -> Tensor:
        u = torch.rand(a.shape, generator=self.random._generator, dtype=a.dtype)
        self.numbers += u.tolist()
        stood = (u < a).cumprod(0).bool()
        self.tests += min(len(a), int(stood.sum()) + 1)
        return stood


def test_every_test_draws_its_own_number():
    """The published code seeds by position, so that the first two tokens of a window share one."""
    session = Case("near", make_table_pair("near", 5), SAMPLED, budget=400).open()
    session._chooser.random = log = Log(session._chooser.random)
    steps = steps_of(session, 3)
    assert log.tests == sum(step.outcome.tested for step in steps)
    assert len(log.numbers) == sum(step.draft.nodes for step in steps if step.draft)
    assert len(set(log.numbers)) == len(log.numbers)


def test_prompts_of_the_same_length_draw_different_numbers():
    """The published code seeds by position alone."""
    outputs = set()
    for number in range(6):
        case = Case(
            "near", make_table_pair("near", 5), SAMPLED, budget=20, prompt_id=f"table/{number}"
        )
        session = case.open()
        steps_of(session, 3)
        outputs.add(tuple(session.output()))
    assert len(outputs) == 6


def test_a_prompt_shorter_than_the_window_and_a_small_vocabulary_work():
    """The published code needs longer prompts, and a vocabulary of more than twice the window."""
    case = Case("near", make_table_pair("near", 3), Sampling(), prompt=(1,), budget=20)
    plain, session = case.open(), case.open()
    list(Vanilla().generate(plain))
    steps_of(session, 8)
    assert session.output() == plain.output()


def mat(a: float, g: int) -> float:
    """Tokens a step where each draft token stands with probability a, independently of the others.

    A rejection is followed by 1/a pre-verifications in the mean, the last of which stands, each a
    token; then by 1/(1 - a^g) post-verifications that commit 1/(1 - a) tokens together.
    """
    return (1 / a + 1 / (1 - a)) / (1 / a + 1 / (1 - a**g))


@pytest.mark.parametrize(("a", "g"), [(0.5, 2), (0.8, 4), (0.9, 3)])
def test_tokens_per_step_follow_the_formula_for_constant_acceptance(a, g):
    target, draft = constant([a, 1 - a, 0.0]), constant([a, 0.0, 1 - a])
    case = Case("constant", (target, draft), SAMPLED, prompt=(0, 0), budget=1500)
    rounds, tokens, steps = [], 0, 0
    for step in steps_of(case.open(), g)[:-g]:  # the last windows are shorter
        tokens, steps = tokens + len(step.outcome.committed), steps + 1
        if step.outcome.origin[-1] == "recovered":  # all begins anew
            rounds.append((tokens, steps))
            tokens = steps = 0
    n = len(rounds)
    assert n > 100
    found = sum(t for t, _ in rounds) / sum(s for _, s in rounds)
    off = math.sqrt(sum((t - found * s) ** 2 for t, s in rounds) / (n - 1))
    error = off / math.sqrt(n) / (sum(s for _, s in rounds) / n)
    assert abs(found - mat(a, g)) < 3 * error < 0.1 * found


def test_a_rejected_token_removes_all_tokens_drafted_after_it():
    """After every step the drafter's state is a prefix of its text, and its text begins with what
    was committed before; no rows of rejected tokens are left in either state."""
    for rule in RULES:
        session = Case("near", make_table_pair("near", 5), rule, budget=60).open()
        for step in Pearl(PearlParams(window=4)).generate(session):
            (desk,) = session.draft_sessions()
            text = session.tokens()
            before = text[: len(text) - len(step.outcome.committed)]
            assert desk.text[: len(before)] == before
            ((_, drafts),) = desk.states
            assert find_wrong_rows(drafts, desk.text) is None
            assert find_wrong_rows(session.state, text[:-1]) is None
            assert session.state.length() == len(text) - 1


@pytest.mark.parametrize(
    ("verify", "draft", "window"),
    [
        (lambda rows: 1.0, 0.25, 4),
        (lambda rows: 1.0 + rows / 10, 0.25, 6),
        (lambda rows: 1.0, 2.0, 1),
        (float, 0.5, 64),
    ],
)
def test_the_auto_window_takes_the_draft_as_long_as_the_target(verify, draft, window):
    case = Case("equal", make_table_pair("equal", 5), Sampling(), budget=200)
    workspace = case.create_workspace()
    workspace.costs = lambda model, rows: verify(rows) if model == "target" else draft
    method = Pearl(PearlParams(window="auto"))
    steps = list(method.generate(case.open(workspace)))
    assert committed(steps)[1] == window
    assert not method.timing_free and Pearl().timing_free


@pytest.mark.parametrize("window", [0, -1, 2.5, "many", True])
def test_an_invalid_window_is_refused(window):
    with pytest.raises(ValidationError, match="must be a whole number from 1, or auto"):
        PearlParams(window=window)
