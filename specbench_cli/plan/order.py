"""Order in which the methods decode each prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence


def balanced_orders(labels: Sequence[str], n_prompts: int, seed: int) -> list[tuple[str, ...]]:
    """Return an order of the labels for each prompt, balanced over position and predecessor.

    The orders follow Williams' design (E. J. Williams, 1949), in cycles of prompts. Within a cycle,
    each label is equally often at each position. It also follows each other label equally often. So
    neither warm caches nor a slow drift of speed favors a method. A cycle has len(labels) prompts,
    or twice as many if len(labels) is odd. The orders in each cycle are shuffled.

    Args:
        labels: n distinct labels.
        n_prompts: Number of orders to return.
        seed: Random seed.
    """
    n = len(labels)
    chance = random.Random(f"order {seed}")
    # The first order is 0, 1, n-1, 2, n-2, ... The differences between its neighbours are all
    # distinct modulo n.
    zigzag = [0] + [i // 2 + 1 if i % 2 == 0 else n - i // 2 - 1 for i in range(n - 1)]
    square = [[(place + row) % n for place in zigzag] for row in range(n)]
    if n % 2:
        square += [row[::-1] for row in square]
    orders: list[tuple[str, ...]] = []
    while len(orders) < n_prompts:
        rows, names = square[:], list(labels)
        chance.shuffle(rows)
        chance.shuffle(names)
        orders += [tuple(names[i] for i in row) for row in rows]
    return orders[:n_prompts]
