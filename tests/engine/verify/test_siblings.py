"""Children of a node: independent draws, draws without replacement, and the remaining
distribution."""

import itertools

import pytest
import torch

from specbench_cli.engine.verify.choosing import draw_siblings
from specbench_cli.engine.verify.siblings import remaining_distribution

Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def test_draws_without_replacement_follow_successive_renormalised_draws(
    exact_distribution,
):
    distribution = exact_distribution(
        lambda random: tuple(draw_siblings(Q[None], 2, random, replacement=False)[0].tolist())
    )
    q = Q.tolist()
    expected = {(i, j): q[i] * q[j] / (1 - q[i]) for i, j in itertools.permutations(range(3), 2)}
    assert distribution == pytest.approx(expected)


def test_independent_draws_may_repeat(exact_distribution):
    distribution = exact_distribution(
        lambda random: tuple(draw_siblings(Q[None], 2, random, replacement=True)[0].tolist())
    )
    q = Q.tolist()
    assert distribution == pytest.approx({(i, j): q[i] * q[j] for i in range(3) for j in range(3)})


def test_beyond_its_support_all_other_tokens_are_equally_likely():
    q = torch.tensor([1.0, 0.0, 0.0])
    assert remaining_distribution(q, []).tolist() == [1.0, 0.0, 0.0]
    assert remaining_distribution(q, [0]).tolist() == [0.0, 0.5, 0.5]
    assert remaining_distribution(q, [0, 2]).tolist() == [0.0, 1.0, 0.0]


def test_many_distributions_are_drawn_from_row_by_row():
    q = torch.stack((Q, Q.flip(0)))
    drawn = torch.tensor([[0], [0]])
    together = remaining_distribution(q, drawn)
    separate = [remaining_distribution(row, [0]) for row in q]
    assert torch.equal(together, torch.stack(separate))
    assert together.dtype == torch.float64
