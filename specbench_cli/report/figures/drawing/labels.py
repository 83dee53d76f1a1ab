"""Placement of labels next to the points of a plot, so that they hide no points or labels.

Each label has candidate spots on rings around its point. In turn, each label moves to its spot with
the lowest cost (`_fixed_costs` plus `_label_costs`), until no label moves any more. The libraries
adjustText and textalloc are not used, because they left labels on points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_GAP, _RINGS, _SPOTS_PER_RING = 3.8, (0.0, 5.0, 11.0, 18.0, 26.0, 36.0), 16
"""Distance from a point to the first ring, distances of all rings from the first one (both in pt),
and number of spots on a ring."""
_MARKER, _CLEAR = 2.8, 0.8
"""Half the side of a marker, and the minimum space between labels, in pt."""
_LINE = 1.2
"""Line height as a multiple of the font size."""
_OUTSIDE, _HIDES, _CROSSES, _MISLEADS, _COVERS = 1e5, 1e4, 1e2, 30.0, 4.0
"""Costs of a label that is outside the axes, that hides a label or point, whose leader line crosses
a point or label, that is closest to another point, and that covers a line of the plot."""
_ROUNDS, _MANY = 30, 64
"""Maximum number of rounds, and maximum number of labels for more than one round. With more
labels, not all of them fit anyway."""
_SAMPLE_PT = 2.0
"""Distance in pt between the sampled positions along a line of the plot."""
_LEADER_SAMPLES = 9
"""Number of sampled positions along a leader line."""


class PointLabel(NamedTuple):
    """A label and its point, in data coordinates.

    If the text is empty, no label is drawn, but other labels do not cover the point.
    """

    text: str
    at: tuple[float, float]
    colour: str


class _Spots(NamedTuple):
    """Candidate spots of a label, in pt.

    Attributes:
        boxes: [spots, 4]: left, lower, right and upper end of the label at each spot.
        lines: [spots, samples, 2]: positions along the leader line from each spot to the point.
            Spots on the first ring have no visible leader line.
        far: [spots]: distance of each spot from the first ring.
    """

    boxes: Floats
    lines: Floats
    far: Floats


def place_labels(axes: Axes, labels: Sequence[PointLabel]) -> None:
    """Write each label next to its point, with a leader line if it is farther away.

    Args:
        axes: Axes of a figure. Its layout must be final.
    """
    from matplotlib.patheffects import withStroke

    visible = [label for label in labels if label.text]
    labels = [*visible, *(label for label in labels if not label.text)]
    halo = [withStroke(linewidth=1.2, foreground="white")]
    scale = 72 / axes.figure.dpi
    points = scale * axes.transData.transform([label.at for label in labels])
    inside = scale * np.array(axes.bbox.extents)
    widths = [72 * style.text_width([label.text], style.SMALL) for label in visible]
    spots = [_spots(point, width) for point, width in zip(points, widths, strict=False)]
    for label, point, own, spot in zip(
        visible, points, spots, _choose(spots, points, inside, _lines(axes, scale)), strict=False
    ):
        corner, size = own.boxes[spot, :2], np.ptp(own.boxes[spot].reshape(2, 2), 0)
        lead = {
            "arrowstyle": "-",
            "lw": 0.4,
            "color": label.colour,
            "relpos": tuple((own.lines[spot, 0] - corner) / size),
            "shrinkA": 0,
            "shrinkB": 1.5,
        }
        axes.annotate(
            label.text,
            label.at,
            xytext=corner + _CLEAR / 2 - point,
            textcoords="offset points",
            fontsize=style.SMALL,
            va="bottom",
            color=label.colour,
            zorder=4,
            path_effects=halo,
            arrowprops=lead if own.far[spot] else None,
        )


def _spots(point: Floats, width: float) -> _Spots:
    """Return the candidate spots of a label around its point, nearest first."""
    angles = 2 * np.pi * np.arange(_SPOTS_PER_RING) / _SPOTS_PER_RING + np.pi / 8
    directions = np.stack([np.cos(angles), np.sin(angles)], -1)
    half = np.array([width, _LINE * style.SMALL]) / 2
    rings = np.repeat(_RINGS, _SPOTS_PER_RING)[:, None]
    directions = np.tile(directions, (len(_RINGS), 1))
    middles = point + directions * (_GAP + rings) + np.clip(1.6 * directions, -1, 1) * half
    boxes = np.concatenate([middles - half - _CLEAR / 2, middles + half + _CLEAR / 2], -1)
    near = np.clip(point, boxes[:, :2], boxes[:, 2:])
    parts = np.linspace(0, 1, _LEADER_SAMPLES)[:, None]
    lines = near[:, None] + parts * (point - near)[:, None]
    return _Spots(boxes, lines, rings[:, 0])


def _lines(axes: Axes, scale: float) -> list[Floats]:
    """Return positions along each line of the plot, in pt: [1, positions, 2] per line."""
    found = []
    for line in (line for line in axes.get_lines() if line.get_linestyle() != "None"):
        corners = scale * axes.transData.transform(np.asarray(line.get_xydata()))
        segments = [
            np.linspace(a, b, 2 + int(np.hypot(*(b - a)) / _SAMPLE_PT))
            for a, b in pairwise(corners)
        ]
        found += [np.concatenate(segments)[None]] if segments else []
    return found


def _choose(
    spots: Sequence[_Spots], points: Floats, inside: Floats, lines: Sequence[Floats]
) -> list[int]:
    """Return the chosen spot of each label.

    The result depends on the order in which labels are moved. The function tries several orders,
    until no label hides anything.
    """
    fixed_costs = [
        _fixed_costs(own, at, points, inside)
        + _COVERS * np.any([_pass_through(line, own.boxes)[0] for line in lines], 0)
        for at, own in enumerate(spots)
    ]
    best, least = list[int](), np.inf
    x, y = points[: len(spots)].T
    too_many = len(spots) > _MANY  # they do not all fit, in any order
    for order_by in (x,) if too_many else (x, -x, y, -y):
        chosen, cost = _move_labels(
            spots, fixed_costs, np.argsort(order_by), 1 if too_many else _ROUNDS
        )
        if cost < least:
            best, least = [chosen[at] for at in range(len(spots))], cost
        if least < _HIDES:
            break
    return best


def _move_labels(
    spots: Sequence[_Spots], fixed_costs: Sequence[Floats], order: Iterable[int], rounds: int
) -> tuple[dict[int, int], float]:
    """Move labels in turn until none moves. Return the spot of each label, and the total cost."""
    chosen: dict[int, int] = {}
    total = 0.0
    for _ in range(rounds):
        before, total = dict(chosen), 0.0
        for at in order:
            others = [(spots[other], spot) for other, spot in chosen.items() if other != at]
            costs = fixed_costs[at] + (_label_costs(spots[at], others) if others else 0.0)
            chosen[at] = int(np.argmin(costs))
            total += costs[chosen[at]]
        if chosen == before:
            break
    return chosen, total


def _fixed_costs(own: _Spots, at: int, points: Floats, inside: Floats) -> Floats:
    """Return the cost of each spot of a label, without regard to other labels.

    A spot costs more if it is outside of the axes, covers points, or is near another point. It also
    costs more if its leader line passes through another point.
    """
    marks = np.concatenate([points - _MARKER, points + _MARKER], -1)
    outside = (own.boxes[:, :2] < inside[:2]).any(1) | (own.boxes[:, 2:] > inside[2:]).any(1)
    hides = _overlap(own.boxes, marks).sum(1)
    has_leader = own.far > 0
    crosses = has_leader * _pass_through(own.lines, np.delete(marks, at, 0)).sum(1)
    distances = _distances(own.boxes, points)
    misleads = ~has_leader * (np.delete(distances, at, 1) < distances[:, at : at + 1] + 1).sum(1)
    costs = _OUTSIDE * outside + _HIDES * hides + _CROSSES * crosses + _MISLEADS * misleads
    return np.asarray(costs + own.far)


def _label_costs(own: _Spots, others: Sequence[tuple[_Spots, int]]) -> Floats:
    """Return the cost of each spot of a label that comes from the current spots of other labels."""
    boxes = np.array([other.boxes[spot] for other, spot in others])
    lines = np.array([other.lines[spot] for other, spot in others if other.far[spot]])
    has_leader = own.far > 0
    crosses = has_leader * _pass_through(own.lines, boxes).sum(1)
    if len(lines):
        crosses = (
            crosses
            + _pass_through(lines, own.boxes).sum(0)
            + has_leader * _count_crossings(own.lines, lines)
        )
    return np.asarray(_HIDES * _overlap(own.boxes, boxes).sum(1) + _CROSSES * crosses)


def _overlap(some: Floats, others: Floats) -> Flags:
    """Return which boxes [n, 4] overlap which boxes [m, 4]: [n, m]."""
    a, b = some[:, None], others[None]
    return _both_true(a[..., :2] < b[..., 2:], b[..., :2] < a[..., 2:])


def _pass_through(lines: Floats, boxes: Floats) -> Flags:
    """Return which lines [n, samples, 2] go through which boxes [m, 4]: [n, m]."""
    at = lines[:, :, None]
    return np.asarray(np.any(_both_true(boxes[:, :2] < at, at < boxes[:, 2:]), 1))


def _both_true(low: Flags, high: Flags) -> Flags:
    """Return where both conditions are true for both coordinates (last axis)."""
    return np.asarray(np.all(low & high, -1))


def _count_crossings(some: Floats, others: Floats) -> NDArray[np.int_]:
    """Count the lines [m, samples, 2] that each line [n, samples, 2] crosses: [n]."""
    a, b, c, d = some[:, None, 0], some[:, None, -1], others[None, :, 0], others[None, :, -1]
    crossing = (_side(a, b, c) * _side(a, b, d) < 0) & (_side(c, d, a) * _side(c, d, b) < 0)
    return np.asarray(np.sum(crossing, 1))


def _side(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a value whose sign is the side of the line from a to b on which c lies."""
    (x, y), (u, v) = np.moveaxis(b - a, -1, 0), np.moveaxis(c - a, -1, 0)
    return np.asarray(x * v - y * u)


def _distances(boxes: Floats, points: Floats) -> Floats:
    """Return the distances between boxes [n, 4] and points [m, 2]: [n, m]."""
    near = np.clip(points, boxes[:, None, :2], boxes[:, None, 2:])
    return np.asarray(np.linalg.norm(near - points, axis=-1))
