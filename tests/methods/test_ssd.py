"""Tests of `ssd`, whose draft model prepares drafts for likely outcomes during verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from methods.ssd import Ssd, SsdParams
from specbench_cli.audit.cases import Case, make_sampling, random_cases
from specbench_cli.audit.models.table import random_table
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.sampling import Sampling


def ssd(**params: Any) -> Ssd:
    return Ssd(SsdParams(**{"length": 4, **params}))


def total(steps: Sequence[Step], counter: str) -> int:
    return sum(step.extra[counter] for step in steps)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("guesses", [1, 2])
def test_a_draft_equal_to_the_target_guesses_every_outcome(rule: str, guesses: int) -> None:
    for turn in range(4):
        table = random_table(5, turn, 1.5)
        case = Case("equal", (table, table), make_sampling(rule, turn), budget=26)
        steps = list(ssd(guesses=guesses).generate(case.open()))
        assert (total(steps, "reused"), total(steps, "missed")) == (4, 0)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_with_every_token_guessed_every_window_is_reused(rule: str) -> None:
    cases = random_cases(rule, 24, 4)
    steps = [step for case in cases for step in ssd(guesses=5).generate(case.open())]
    assert total(steps, "missed") == 0
    assert total(steps, "reused") > 20


def test_more_guesses_find_more_outcomes(open_session: Any) -> None:
    def reused(guesses: int) -> int:
        session = open_session(2, Sampling(), budget=32)
        return total(list(ssd(guesses=guesses).generate(session)), "reused")

    none, few, many = (reused(guesses) for guesses in (0, 1, 12))
    assert none == 0 < few <= many


def test_the_target_runs_whole_and_the_draft_a_level_a_forward(open_session: Any) -> None:
    session = open_session(13, Sampling(), budget=30)
    first, second, *_ = ssd(guesses=2).generate(session)
    assert [f.layers for f in first.forwards if f.model == "target"] == [(0, 2)]
    # Forwards that prepared drafts in the first step are reported with the second step.
    fed = [f.n_tokens for f in second.forwards if f.worker]
    assert fed[:5] == [1, 10, 10, 10, 10]
    assert len(fed) == (5 if second.extra["reused"] else 9)
