"""Tests of the order in which methods decode each prompt."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.plan.order import balanced_orders


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_positions_and_predecessors_are_balanced_over_a_cycle(n, seed):
    labels = [f"m{i}" for i in range(n)]
    orders = balanced_orders(labels, 2 * n if n % 2 else n, seed)
    places = Counter((label, place) for order in orders for place, label in enumerate(order))
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == n * n and len(set(places.values())) == 1
    assert len(pairs) == n * (n - 1) and len(set(pairs.values())) <= 1


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 9))
def test_every_prompt_has_every_method_once_in_a_seeded_order(n, prompts, seed):
    labels = [f"m{i}" for i in range(n)]
    orders = balanced_orders(labels, prompts, seed)
    assert len(orders) == prompts
    assert all(sorted(order) == labels for order in orders)
    assert orders == balanced_orders(labels, prompts, seed)


def test_another_seed_gives_another_order():
    labels = list("abcdef")
    assert balanced_orders(labels, 30, 0) != balanced_orders(labels, 30, 1)
