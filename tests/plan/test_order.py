"""The order in which rows visit prompts."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.plan.order import balanced_orders


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_over_a_cycle_every_label_has_every_place_and_every_predecessor_equally_often(n, seed):
    labels = [f"m{i}" for i in range(n)]
    orders = balanced_orders(labels, 2 * n if n % 2 else n, seed)
    places = Counter((label, place) for order in orders for place, label in enumerate(order))
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == n * n and len(set(places.values())) == 1
    assert len(pairs) == n * (n - 1) and len(set(pairs.values())) <= 1


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 9))
def test_every_prompt_gets_every_label_once_and_the_seed_decides(n, prompts, seed):
    labels = [f"m{i}" for i in range(n)]
    orders = balanced_orders(labels, prompts, seed)
    assert len(orders) == prompts
    assert all(sorted(order) == labels for order in orders)
    assert orders == balanced_orders(labels, prompts, seed)


def test_another_seed_gives_another_order():
    labels = list("abcdef")
    assert balanced_orders(labels, 30, 0) != balanced_orders(labels, 30, 1)
