"""Cost of a forward: the properties that determine it, and the function that returns the time.

Times are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SequenceRows(NamedTuple):
    """The rows of one sequence in a forward. A row is one token.

    Attributes:
        new: Number of rows that the forward computes.
        before: Number of rows that the model's state contained before the forward.
        prompt: True if the new rows belong to the prompt.
    """

    new: int
    before: int
    prompt: bool


@dataclass(slots=True)
class ForwardWork:
    """Properties of a forward that its cost depends on.

    Attributes:
        model: Which model runs: "target", "draft", or the kind of a draft head.
        rows: Rows of each sequence.
        tree: True if the forward verifies a draft tree, False if it verifies a chain.
        warm: True if the previous forward on the same worker also ran the target. The target's
            weights are then still in the CPU caches.
        share: Share of the model's weights that the forward reads.
    """

    model: str
    rows: Sequence[SequenceRows]
    tree: bool = False
    warm: bool = False
    share: float = 1.0


CostFunction = Callable[[ForwardWork], float]
"""Return the nanoseconds that a forward takes."""
