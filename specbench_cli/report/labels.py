"""Words beside the points of a plot, where they hide neither points nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE, _WIDE = 6, 0.62
"""Of the letters: height in points, and width as a part of it."""
_GAP = 3.5


class Word(NamedTuple):
    """A word and the point of the data that it belongs to."""

    text: str
    at: tuple[float, float]
    colour: str


class _Box(NamedTuple):
    left: float
    low: float
    right: float
    high: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.low < other.high
            and other.low < self.high
        )


def write_beside(axes: Axes, words: Sequence[Word]) -> None:
    """Write each word at the first place around its point that is free, or least crowded.

    Args:
        axes: of a figure whose layout is settled.
    """
    scale = 72 / axes.figure.dpi
    points = [tuple(scale * axes.transData.transform(word.at)) for word in words]
    taken = [_Box(x - 2, y - 2, x + 2, y + 2) for x, y in points]
    inside = _Box(*(scale * edge for edge in axes.bbox.extents))
    for word, (x, y) in zip(words, points, strict=True):
        wide = _SIZE * _WIDE * len(word.text)
        spots = [
            _Box(left, low, left + wide, low + _SIZE)
            for low in (y + 3, y - _SIZE - 3, y + 3 + _SIZE, y - 2 * _SIZE - 3)
            for left in (x + _GAP, x - _GAP - wide)
        ]
        free = [spot for spot in spots if inside.left <= spot.left and spot.right <= inside.right]
        best = min(free or spots, key=lambda spot: sum(spot.meets(other) for other in taken))
        taken.append(best)
        axes.annotate(
            word.text,
            word.at,
            xytext=(best.left - x, best.low - y),
            textcoords="offset points",
            fontsize=_SIZE,
            color=word.colour,
            zorder=4,
        )
