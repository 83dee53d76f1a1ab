"""Figure of lossy methods: accuracy against speed.

The figure is 84 mm wide. The variants of a method that differ only in numbers (such as
`alpha=0.3`) form one line. Lines differ in colour and marker. The random controls of a method have
its colour and hollow markers. Vanilla, lossless methods and the draft model alone are grey.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.drawing.style import MUTED
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.metrics import MethodSummary, has_partial
from specbench_cli.summary.summary import Summary

RANDOM = "random"
"""Value of a parameter that makes a method accept rejected tokens at random, as a control."""
_BY_WORK = "tokens per work of a full target forward"

Speed = Callable[[MethodSummary], float | None]


def draw(summary: Summary) -> plots.Figure | None:
    """Return the figure, or None if no lossy method has a score."""
    return plots.page([panel(summary)], columns=2) if _series(_select_lossy(summary)) else None


def panel(summary: Summary) -> plots.Panel:
    """Return the only panel of the figure.

    The speed axis shows the speedup over vanilla if all lossy methods have one. Otherwise it shows
    tokens per target forward, which has no timing noise. If some forwards run only a part of the
    target, they count as that part of a forward.
    """
    lossy = _select_lossy(summary)
    speed: Speed = lambda row: row.per_forward  # noqa: E731 - one of three measures
    name = "tokens per target forward"
    if all(row.speedup is not None for row in lossy):
        speed, name = (lambda row: row.speedup), "speedup over vanilla"
    elif has_partial(lossy):
        speed, name = (lambda row: 1 / row.work if row.work else None), _BY_WORK
    lines = [
        _line(label, rows, at, speed) for at, (label, rows) in enumerate(_series(lossy).items())
    ]
    y = plots.Axis("accuracy", tick_format=lambda value, _: f"{value:.0%}")
    return plots.Panel([*lines, *_references(summary, speed)], plots.Axis(name), y, height=2.6)


def _select_lossy(summary: Summary) -> list[MethodSummary]:
    """Return the lossy methods with an accuracy and a known number of target forwards."""
    return [row for row in summary.lossy if row.score is not None and row.per_forward is not None]


def _series(lossy: Sequence[MethodSummary]) -> dict[str, list[MethodSummary]]:
    """Return the name of each line -> the methods on the line.

    The line of a method is followed by the line of its random controls, which may be empty.
    """
    name = {row.label: _line_name(row, lossy) for row in lossy}
    found: dict[str, list[MethodSummary]] = {}
    for row in lossy:
        if not row.control:
            found.setdefault(name[row.label], [])
            found.setdefault(f"{name[row.label]}, at random", [])
    for row in lossy:
        line = name.get(str(row.params.get("like")), name[row.label])
        at_random = row.control or RANDOM in row.params.values()
        found.setdefault(f"{line}, at random" if at_random else line, []).append(row)
    return found


def _line_name(row: MethodSummary, lossy: Sequence[MethodSummary]) -> str:
    """Return the name of a method's line: the method, and the texts in which its variants
    differ."""
    rows = [other for other in lossy if other.method == row.method and not other.control]
    words = [
        word
        for key, word in row.params.items()
        if isinstance(word, str)
        and word != RANDOM
        and len({str(other.params.get(key)) for other in rows} - {RANDOM}) > 1
    ]
    return " ".join([row.method, *words])


def _references(summary: Summary, speed: Speed) -> Iterator[plots.Mark]:
    """Yield vanilla's and the draft model's accuracy as lines, and lossless methods as crosses."""
    for row in summary.rows:
        if row.score is None:
            continue
        if row.label == BASELINE or (row.control and row.per_forward is None):
            line, look = "-" if row.lossless else ":", (style.TINY, MUTED, (0, 1.5))
            yield plots.RuleLine(y=row.score, colour=MUTED, width=0.7, line=line)
            yield plots.Note(row.label, None, row.score, *look, "right", "baseline")
        elif row.lossless and not row.peer and (x := speed(row)) is not None:
            cross = style.Look(MUTED, "x", "", "", 4, 0.9, zorder=2)
            yield plots.PlotSeries([plots.PlotPoint(x, row.score)], cross)


def _line(name: str, rows: Sequence[MethodSummary], at: int, speed: Speed) -> plots.PlotSeries:
    """Return the points of a line, sorted by speed, each with the interval of its accuracy."""
    points = []
    for row in rows:
        if (x := speed(row)) is not None:
            y, ends = row.score or 0.0, (row.score_difference_low, row.score_difference_high)
            points.append(plots.PlotPoint(x, y, *(y + _offset_from_mean(row, end) for end in ends)))
    hollow = at % 2 == 1
    look = style.series_look(
        at // 2, hollow=hollow, line=":" if hollow else "-", zorder=3 - hollow / 2
    )
    return plots.PlotSeries(sorted(points), look, name)


def _offset_from_mean(row: MethodSummary, end: float | None) -> float:
    """Return the distance from a method's score difference to an end of its interval."""
    return 0.0 if end is None or row.score_difference is None else end - row.score_difference
