"""Words beside the points of a plot, where they hide neither points nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE, _WIDE = 6, 0.62
"""Of the letters: height in points, and width as a part of it."""
_GAP = 3.5
_AWAY, _FAR = 6, 12
"""Lines of words that one may be away from its point; points beyond which a line leads to it."""


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

    def within(self, other: _Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.low <= self.low
            and self.high <= other.high
        )

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
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=1.2, foreground="white")]
    scale = 72 / axes.figure.dpi
    points = [tuple(scale * axes.transData.transform(word.at)) for word in words]
    taken = [_Box(x - 2, y - 2, x + 2, y + 2) for x, y in points]
    inside = _Box(*(scale * edge for edge in axes.bbox.extents))
    for word, (x, y) in zip(words, points, strict=True):
        spots = _spots(x, y, _SIZE * _WIDE * len(word.text))
        free = [spot for spot in spots if spot.within(inside)]
        best = min(free or spots, key=lambda spot: sum(spot.meets(other) for other in taken))
        taken.append(best)
        far = abs((best.low + best.high) / 2 - y) > _FAR
        axes.annotate(
            word.text,
            word.at,
            xytext=(best.left - x, best.low - y),
            textcoords="offset points",
            fontsize=_SIZE,
            color=word.colour,
            zorder=4,
            path_effects=halo,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": word.colour, "shrinkB": 2}
            if far
            else None,
        )


def _spots(x: float, y: float, wide: float) -> list[_Box]:
    """Places for a word around a point, the nearest first."""
    rows = [y + sign * (3 + _SIZE / 2 + _SIZE * away) for away in range(_AWAY) for sign in (1, -1)]
    return [
        _Box(left, middle - _SIZE / 2, left + wide, middle + _SIZE / 2)
        for middle in [*rows[:2], y, *rows[2:]]
        for left in (x + _GAP, x - _GAP - wide, x - wide / 2)
        if middle != y or left != x - wide / 2
    ]
