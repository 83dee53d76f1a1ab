"""The figure of a sweep: discard rate against verification rate, and time against the parameter.

174 mm wide (two columns of a journal). Lines are told apart by colours that colour-blind people can
tell apart (Okabe & Ito) and by the shape of their points, which carry the parameter's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specbench_cli.config.document import scalar
from specbench_cli.config.sweep import written
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.labels import Word, write_beside
from specbench_cli.report.figures.drawing.plots import Point, Series
from specbench_cli.report.figures.drawing.style import INK, MUTED
from specbench_cli.summary.pareto import Point as SweepPoint
from specbench_cli.summary.pareto import Sweep, is_number, is_ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN, _LEGEND_ROW_IN = 2.1, 0.15
_FRONT = "#b5b5b5"

Lines = dict[str, list[SweepPoint]]
"""By the name of a line, the points on it."""


def draw(sweep: Sweep) -> Figure | None:
    """The figure; None where no swept row is lossless and has rates that are known."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    series: Lines = {}
    for point in sweep.points:
        known = point.row.discard_rate is not None and point.row.verification_rate is not None
        if known and point.row.lossless:  # of others see `frontier`
            series.setdefault(point.series, []).append(point)
    if not any(point.along for points in series.values() for point in points):
        return None
    swept = list(dict.fromkeys(p.along for own in series.values() for p in own if p.along))
    columns = 4
    entries = 1 + sum(len({is_ranked(p.row) for p in points}) for points in series.values())
    legend = _LEGEND_ROW_IN * -(-entries // columns) + 0.1
    height = max(2.7, _PANEL_IN * len(swept)) + legend
    layout = ConstrainedLayoutEngine(w_pad=0.08, rect=(0, legend / height, 1, 1 - legend / height))
    figure = style.blank(style.PAGE_IN, height, layout=layout)
    grid = figure.add_gridspec(len(swept), 2)
    rates = figure.add_subplot(grid[:, 0])
    looks = {name: style.look(i) for i, name in enumerate(series)}
    words = _rates(rates, series, looks)
    for place, name in enumerate(swept):
        own = {key: points for key, points in series.items() if points[0].along == name}
        _times(figure.add_subplot(grid[place, 1]), name, own, looks)
    style.legend_below(figure, *rates.get_legend_handles_labels(), columns=columns)
    figure.draw_without_rendering()  # from here on it is known where points lie on the paper
    write_beside(rates, words)
    return figure


def _rates(axes: Axes, series: Lines, looks: dict[str, tuple[str, str]]) -> list[Word]:
    """Left: what each row discards and verifies. A row that is not swept and lies far out stands at
    the edge, with its discard rate in words: the lines keep their room.

    Returns:
        What is to be written beside the points.
    """
    from matplotlib.cbook import pts_to_poststep

    words: list[Word] = []
    front = sorted(_rate(p) for points in series.values() for p in points if p.front)
    edge = _ROOM * max(_rate(p)[0] for points in series.values() for p in points if _inside(p))
    if front:
        axes.plot(*pts_to_poststep(*_split(front)), color=_FRONT, lw=2.2, label="Pareto front")
    for name, points in series.items():
        colour, marker = looks[name]
        line = [p for p in points if p.along and is_number(p.swept[p.along])]
        axes.plot(*_split(map(_rate, line)), color=colour, lw=0.9, zorder=2)
        for plain, face, label in ((True, colour, name), (False, "white", f"{name} (not ranked)")):
            own = [p for p in points if is_ranked(p.row) is plain]
            if own:
                x, y = _split(map(_rate, own))
                axes.scatter(
                    [min(value, edge) if edge else value for value in x],
                    y,
                    marker=marker,
                    facecolor=face,
                    edgecolor=colour,
                    s=17,
                    linewidth=0.9,
                    zorder=3,
                    label=label,
                )
        for p in points:
            discard, verified = _rate(p)
            if p.along:
                words.append(Word(written(p.swept[p.along]), (discard, verified), colour))
            elif discard > edge > 0:
                words.append(Word(f"at {discard:.2g}", (edge, verified), colour))
            else:
                words.append(Word("", (discard, verified), colour))
    axes.set_xlabel("discard rate (drafted, not accepted / generated)")
    axes.set_ylabel("verification rate\n(target forwards / generated)")
    style.strip(axes, "left", "bottom")
    style.grid(axes)
    return words


_TICKS = 12
"""Values that a right panel's axis has room for; words are named all the same."""
_ROOM = 1.15
"""How far the left panel reaches beyond the swept rows."""


def _inside(point: SweepPoint) -> bool:
    """Whether a point decides how far the left panel reaches."""
    return point.along is not None or point.front


def _times(axes: Axes, name: str, series: Lines, looks: dict[str, tuple[str, str]]) -> None:
    """Right: the speedup along a parameter; without any, milliseconds a token."""
    points = [p for own in series.values() for p in own]
    sped = any(p.row.speedup is not None for p in points)
    places = _places([p.swept[name] for p in points])
    if sped:
        axes.axhline(1, color=INK, lw=0.6, zorder=1)
        axes.annotate(
            "vanilla",
            (1, 1),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            va="center",
            textcoords="offset points",
            fontsize=6,
            color=MUTED,
        )
    aside = {
        key: 0.008 * max(places.values()) * (shift - (len(series) - 1) / 2)
        for shift, key in enumerate(series)
    }
    for key, own in series.items():
        colour, marker = looks[key]
        for line, face, kind in (
            ("-", colour, (True, True)),
            ("none", colour, (False, True)),
            ("none", "white", (True, False)),
            ("none", "white", (False, False)),
        ):
            known = [
                Point(places[written(p.swept[name])] + aside[key], *value)
                for p in own
                if (is_number(p.swept[name]), is_ranked(p.row)) == kind
                and (value := _time(p, sped)) is not None
            ]
            Series(points=known, colour=colour, marker=marker, face=face, line=line).draw(axes)
    numbers = [word for word in places if is_number(scalar(word))]
    shown = set(numbers[:: 1 + len(places) // _TICKS]) | (places.keys() - set(numbers))
    ticks = {word: place for word, place in places.items() if word in shown}
    turned = 30 if any(len(word) > 5 for word in ticks) else 0
    axes.set_xticks(
        list(ticks.values()), list(ticks), rotation=turned, ha="right" if turned else "center"
    )
    axes.set_xlabel(name)
    axes.set_ylabel("speedup (95% interval)" if sped else "ms/token (median)")
    if sped:
        axes.yaxis.set_major_formatter(style.as_ratio)
        heights = [1.0, *(p.row.speedup for p in points if p.row.speedup is not None)]
        ends = [p.row.speedup_high for p in points if p.row.speedup_high is not None]
        axes.set_ylim(top=min(axes.get_ylim()[1], style.reach(heights, ends)))
        for key, own in series.items():
            highs = [
                (places[written(p.swept[name])] + aside[key], p.row.speedup_high or 0.0)
                for p in own
            ]
            style.mark_cut(axes, highs, looks[key][0])
    style.strip(axes, "left", "bottom")
    style.grid(axes)


def _places(values: Sequence[Any]) -> dict[str, float]:
    """Where on the axis each value stands: numbers at themselves, words after them."""
    numbers = sorted({value for value in values if is_number(value)})
    gaps = sorted(b - a for a, b in pairwise(numbers))
    step = gaps[len(gaps) // 2] if gaps else 1.0
    found = {written(value): float(value) for value in numbers}
    end = numbers[-1] if numbers else 0.0
    for word in dict.fromkeys(written(value) for value in values if not is_number(value)):
        end += step
        found[word] = end
    return found


def _rate(point: SweepPoint) -> tuple[float, float]:
    assert point.row.discard_rate is not None
    assert point.row.verification_rate is not None
    return point.row.discard_rate, point.row.verification_rate


def _split(pairs: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The first of each pair, and the second."""
    listed = list(pairs)
    return [x for x, _ in listed], [y for _, y in listed]


def _time(point: SweepPoint, sped: bool) -> tuple[float, float, float] | None:
    """Return the height of a point and the ends of its interval."""
    row = point.row
    height = row.speedup if sped else row.ms_per_token_p50
    if height is None:
        return None
    if not sped or row.speedup_low is None or row.speedup_high is None:
        return height, height, height
    return height, row.speedup_low, row.speedup_high
