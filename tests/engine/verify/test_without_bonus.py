"""Verification without the last node's logits: all draft tokens are tested, without a bonus
token."""

from __future__ import annotations

import pytest
import torch

from specbench_cli.engine.types import Draft
from specbench_cli.engine.verify import decide
from specbench_cli.engine.verify.random import Random, SeededRandom
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import MethodFault

TOKENS = torch.tensor([1, 2])
P = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)


def test_a_fully_accepted_chain_is_committed_without_a_bonus():
    outcome, root = decide.decide_by_choice(Draft(TOKENS), None, torch.tensor([1, 2]))
    assert outcome.committed == (1, 2) and outcome.path == (0, 1) and outcome.tested == 2
    assert outcome.origin == ("accepted", "accepted") and root.tolist() == [2]


@pytest.mark.parametrize(
    ("choices", "committed", "tested"), [([1, 0], (1, 0), 2), ([0, 2], (0,), 1)]
)
def test_the_last_row_is_used(choices, committed, tested):
    outcome, root = decide.decide_by_choice(Draft(TOKENS), None, torch.tensor(choices))
    assert outcome.committed == committed and outcome.tested == tested
    assert outcome.origin[-1] == "recovered" and root.tolist() == [committed[-1]]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_committed_tokens_follow_the_targets_distribution(rule, exact_distribution):
    """Two tokens are drawn from Q. If fewer are committed, the others are drawn from P."""

    def run(random: Random) -> tuple[int, ...]:
        tokens = random.categorical(Q)
        outcome, _ = decide.decide_by_draw(
            Draft(tokens, draw_mode="independent", q=Q), None, P, random, rule
        )
        committed = list(outcome.committed)
        while len(committed) < 2:
            committed.append(int(random.categorical(P[len(committed)])))
        return tuple(committed)

    distribution = exact_distribution(run)
    for first in range(3):
        for second in range(3):
            due = float(P[0, first] * P[1, second])
            assert distribution[first, second] == pytest.approx(due, abs=1e-12)


def test_a_fully_accepted_chain_draws_no_bonus():
    class Counting(SeededRandom):
        distributions: list[torch.Tensor]

        def categorical(self, p):
            self.distributions = [*getattr(self, "distributions", []), p]
            return super().categorical(p)

    random = Counting(0, "p", 0, 1, torch.device("cpu"))
    outcome, _ = decide.decide_by_draw(
        Draft(TOKENS, draw_mode="independent", q=P), None, P, random, "rejection"
    )
    assert outcome.committed == (1, 2)
    assert [distribution.tolist() for distribution in random.distributions] == [
        [[0.0, 0.0, 1.0]]
    ]  # one outcome only


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_another_number_of_rows_is_refused(rows, open_session, random_table):
    session = open_session(random_table(3, 1), sampling=Sampling())
    session.prefill()
    draft = session.chain((1, 2))
    with pytest.raises(MethodFault, match=f"2 nodes cannot be verified by {rows} rows"):
        session.verify(draft, torch.zeros(rows, 3))


def test_a_tree_needs_all_rows(open_session, random_table):
    session = open_session(random_table(3, 1), sampling=Sampling())
    session.prefill()
    with pytest.raises(MethodFault, match="2 nodes cannot be verified by 2 rows"):
        session.verify(Draft(torch.tensor([1, 2]), (-1, -1)), torch.zeros(2, 3))
