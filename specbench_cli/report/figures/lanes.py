"""Who computed when: a lane a worker, forwards by what they were for, messages as arrows.

Time runs from the end of prefill. A mark under a lane ends a step; the number at it is how many
tokens the step committed. A forward through a part of a model is drawn less high, by its share.
Learning, which came before the request, has a lane without a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from specbench_cli.predict.lanes import Lanes, lanes_of
from specbench_cli.predict.replay import RecordedForward
from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {role: style.PARTS[role] for role in ("prefill", "draft", "verify", "aux", "learn")} | {
    "unused": ("white", "xxxxxx")
}
"""Of what a forward was for."""
_EDGE = dict.fromkeys(_LOOKS, "white") | {"unused": style.MUTED}
_LANE_IN, _BAR, _ROOM_IN = 0.24, 0.5, 0.11
"""Height of a lane and, in lanes, of its forwards; the width that a step's number needs."""
_LEARNING, _LEARNT = -1, 0.06
"""The lane of learning among an output's workers, and how much of the width stands for it."""
_LOWEST = 0.3
"""Height of a forward through next to nothing of a model, in that of a whole one."""
_STEPS = 4
"""Of the row with the longest steps, in the figure of a run."""


def draw(cells: Cells) -> Figure | None:
    """The lanes of a run's first prompt, as long as a few steps take; None without traces."""
    order = {label: place for place, label in enumerate(cells.records)}
    records = sorted(cells.traced, key=lambda record: order[record.label])
    return draw_lanes([lanes_of(record) for record in records], style.COLUMN_IN, _STEPS)


def draw_lanes(lanes: Sequence[Lanes], width: float, steps: int) -> Figure | None:
    """The first steps of some outputs.

    Args:
        width: of the figure, in inches.
        steps: that the output with the longest ones has room for.
    Returns:
        None where no output has forwards after its prefill.
    """
    lanes = [own for own in lanes if own.decoding]
    if not lanes:
        return None
    window = _window(lanes, steps)
    places = _places(lanes)
    left = style.room_for(name for name, _ in places.values())
    bottom = max(at for _, at in places.values()) + 0.6
    figure = style.blank(width, _LANE_IN * (bottom + 0.5) + 0.52)
    axes = style.frame(figure, left, 0.1, 0.03, 0.49)
    axes.set(xlim=(0, window / 1e6), ylim=(bottom, -0.5))
    for place, own in enumerate(lanes):
        at = {worker: places[place, worker][1] for worker in own.workers}
        _forwards(axes, own, at, window)
        _messages(axes, own, at, window)
        _marks(axes, own, max(at.values()), window)
        if own.learn:
            _learning(axes, own, places[place, _LEARNING][1], window)
    style.strip(axes, "bottom")
    _names(axes, list(places.values()))
    style.name_x(axes, f"ms of decoding, {lanes[0].prompt_id}")
    learnt = ["learn"] * any(own.learn for own in lanes)
    _legend(figure, learnt + [_look(span) for own in lanes for span in _inside(own, window)])
    return figure


def _window(lanes: Sequence[Lanes], steps: int) -> float:
    """Ns that are drawn: so many of the longest steps, or all there is."""
    last = max(own.decoding[-1].end - own.prefill for own in lanes)
    typical = [median(step.end - step.start for step in own.steps) for own in lanes if own.steps]
    return min(last, steps * max(typical, default=last))


def _places(lanes: Sequence[Lanes]) -> dict[tuple[int, int], tuple[str, float]]:
    """By output and worker, the name and the height of a lane; an output's lanes keep together."""
    found, at = {}, 0.0
    for place, own in enumerate(lanes):
        for worker, models in own.workers.items():
            name = own.label if len(own.workers) == 1 else f"{own.label}: {models}"
            found[place, worker] = name, at
            at += 1.0
        if own.learn:
            found[place, _LEARNING] = f"{own.label}: learning", at
            at += 1.0
        at += 0.25
    return found


def _inside(own: Lanes, window: float) -> list[RecordedForward]:
    return [span for span in own.decoding if span.start - own.prefill < window]


def _look(span: RecordedForward) -> str:
    return span.role if span.used else "unused"


def _forwards(axes: Axes, own: Lanes, at: dict[int, float], window: float) -> None:
    """Each worker's forwards, one collection for each look and height."""
    drawn: dict[tuple[int, str, float], list[tuple[float, float]]] = {}
    for span in _inside(own, window):
        start = (span.start - own.prefill) / 1e6
        drawn.setdefault((span.worker, _look(span), span.share), []).append(
            (start, (span.end - span.start) / 1e6)
        )
    for height in at.values():
        axes.axhline(height, color=style.FAINT, lw=0.5, zorder=0)
    for (worker, look, share), bars in drawn.items():
        colour, hatch = _LOOKS[look]
        height = _BAR * (_LOWEST + (1 - _LOWEST) * share)
        axes.broken_barh(
            bars,
            (at[worker] + _BAR / 2 - height, height),
            facecolor=colour,
            hatch=hatch,
            edgecolor=_EDGE[look],
            lw=0.1,
            zorder=2,
        )


def _learning(axes: Axes, own: Lanes, at: float, window: float) -> None:
    """How long learning took, which may be many times what is drawn of decoding."""
    colour, hatch = _LOOKS["learn"]
    length = _LEARNT * window / 1e6
    axes.broken_barh(
        [(-length, length)],
        (at - _BAR / 2, _BAR),
        facecolor=colour,
        hatch=hatch,
        edgecolor=_EDGE["learn"],
        lw=0.1,
        zorder=2,
    )
    axes.set_xlim(left=-length)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= window / 1e6])
    said = f" {own.learn / 1e6:.3g} ms, before prefill"
    axes.text(0, at, said, va="center", fontsize=style.TINY, color=style.MUTED)


def _messages(axes: Axes, own: Lanes, at: dict[int, float], window: float) -> None:
    for arrow in own.arrows:
        sent, read = ((when - own.prefill) / 1e6 for when in (arrow.sent, arrow.read))
        if sent < 0 or read > window / 1e6 or not {arrow.sender, arrow.receiver} <= at.keys():
            continue
        down = 1 if at[arrow.receiver] > at[arrow.sender] else -1
        axes.annotate(
            "",
            (read, at[arrow.receiver] - down * _BAR / 2),
            (sent, at[arrow.sender] + down * _BAR / 2),
            arrowprops={
                "arrowstyle": "-|>",
                "lw": 0.4,
                "mutation_scale": 4,
                "shrinkA": 0,
                "shrinkB": 0,
                "color": style.INK,
            },
            zorder=3,
        )


def _marks(axes: Axes, own: Lanes, at: float, window: float) -> None:
    """The ends of steps, and how many tokens each committed where that can be read."""
    inches = axes.bbox.width / axes.figure.dpi / (window / 1e6)
    taken = -_ROOM_IN
    for step in own.steps:
        end = (step.end - own.prefill) / 1e6
        if end > window / 1e6:
            break
        axes.plot([end, end], [at + _BAR / 2, at + _BAR / 2 + 0.13], color=style.INK, lw=0.5)
        if (end * inches) - taken >= _ROOM_IN and end * inches >= _ROOM_IN / 2:
            taken = end * inches
            axes.text(
                end,
                at + _BAR / 2 + 0.08,
                str(step.committed),
                ha="right",
                va="top",
                fontsize=5,
                color=style.MUTED,
            )


def _names(axes: Axes, lanes: Sequence[tuple[str, float]]) -> None:
    """Two outputs of one method have lanes of one name."""
    style.name_rows(axes, [name for name, _ in lanes], [at for _, at in lanes])


def _legend(figure: Figure, met: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    looks = {name: look for name, look in _LOOKS.items() if name in met}
    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=_EDGE[name], lw=0.1)
        for name, (colour, hatch) in looks.items()
    ]
    style.legend_below(figure, patches, list(looks), columns=len(looks))
