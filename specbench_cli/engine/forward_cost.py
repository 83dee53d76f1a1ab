"""Cost of a forward: its properties, and the function that returns its time in nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SequenceRows(NamedTuple):
    """The rows of one sequence in a forward.

    Attributes:
        new: Number of rows that the forward computes.
        before: Number of rows in the model's state before them.
        prompt: True if the new rows belong to the prompt.
    """

    new: int
    before: int
    prompt: bool


@dataclass(slots=True)
class ForwardWork:
    """Properties of a forward that its cost depends on.

    Attributes:
        model: "target", "draft", or the kind of a head.
        rows: Rows of each sequence.
        tree: Whether the forward verifies a tree, not a chain.
        warm: Whether the previous forward on the same worker also ran the target, so that its
            weights are still in the caches.
        share: Share of the model's weights that the forward reads.
    """

    model: str
    rows: Sequence[SequenceRows]
    tree: bool = False
    warm: bool = False
    share: float = 1.0


CostFunction = Callable[[ForwardWork], float]
"""Return the nanoseconds that a forward takes."""
