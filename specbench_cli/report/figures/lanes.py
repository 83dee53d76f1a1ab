"""Timeline of a few steps: a lane a worker, forwards by their purpose, messages as arrows.

Time runs from the end of prefill. A mark under a lane ends a step; the number at it is how many
tokens the step committed. A forward through a part of a model is drawn less high, by its share.
Learning, which came before the request, has a lane without a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from specbench_cli.predict.lanes import WorkerLanes, make_lanes
from specbench_cli.report.figures.cells import Cells
from specbench_cli.report.figures.drawing import plots, style

_LOOKS = {role: style.PARTS[role] for role in ("prefill", "draft", "verify", "aux", "learn")} | {
    "unused": ("white", "xxxxxx")
}
"""Colour and hatching by the purpose of a forward."""
_EDGE = dict.fromkeys(_LOOKS, "white") | {"unused": style.MUTED}
_LANE_IN, _BAR, _ROOM_IN = 0.24, 0.5, 0.11
"""Height of a lane and, in lanes, of its forwards; the width that a step's number needs."""
_LEARNING, _LEARNT = -1, 0.06
"""The lane of learning among an output's workers, and how much of the width stands for it."""
_LOWEST = 0.3
"""Height of a forward through next to nothing of a model, in that of a whole one."""
_STEPS = 4
"""Steps in the figure of a run, of the row with the longest ones."""


def draw(cells: Cells) -> plots.Figure | None:
    """The lanes of a run's first prompt, as long as a few steps take; None without traces."""
    order = {label: place for place, label in enumerate(cells.records)}
    records = sorted(cells.traced, key=lambda record: order[record.label])
    return draw_lanes([make_lanes(record) for record in records], style.COLUMN_IN, _STEPS)


def draw_lanes(lanes: Sequence[WorkerLanes], width: float, steps: int) -> plots.Figure | None:
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
    names = list(places.values())
    wide = plots.row_width([name for name, _ in names], width)
    boxes: dict[str, list[plots.Box]] = {look: [] for look in _LOOKS}
    marks: list[plots.Mark] = []
    for place, own in enumerate(lanes):
        at = {worker: places[place, worker][1] for worker in own.workers}
        marks += [plots.Rule(y=y, colour=style.FAINT, zorder=0) for y in at.values()]
        marks += _messages(own, at, window)
        marks += _ends_of_steps(own, max(at.values()), window, wide)
        for forward in own.decoding:
            start, end = (_ms(own, when) for when in (forward.start, forward.end))
            if start < window:
                height = _BAR * (_LOWEST + (1 - _LOWEST) * forward.share)
                y = at[forward.worker] + _BAR / 2 - height
                look = forward.role if forward.used else "unused"
                boxes[look].append(plots.Box(start, y, end - start, height))
        if own.learn:
            y, length = places[place, _LEARNING][1], _LEARNT * window
            boxes["learn"].append(plots.Box(-length, y - _BAR / 2, length, _BAR))
            words = f" {own.learn / 1e6:.3g} ms, before prefill"
            marks.append(plots.Note(words, 0, y, style.TINY, style.MUTED))
    marks += [
        plots.Bars(own, *_LOOKS[look], look, _EDGE[look], 0.1) for look, own in boxes.items() if own
    ]
    begin = -_LEARNT * window if boxes["learn"] else 0.0
    x = plots.Axis(f"ms of decoding, {lanes[0].prompt_id}", begin, window)
    panel = plots.Panel(marks, x)
    return plots.row_plot(names, [panel], _LANE_IN, width=width, columns=len(_LOOKS))


def _ms(own: WorkerLanes, when: float) -> float:
    """Return the time since the end of prefill in milliseconds."""
    return (when - own.prefill) / 1e6


def _window(lanes: Sequence[WorkerLanes], steps: int) -> float:
    """Return the milliseconds that are drawn: `steps` of the longest steps, or all there is."""
    last = max(_ms(own, own.decoding[-1].end) for own in lanes)
    typical = [
        median(step.end - step.start for step in own.steps) / 1e6 for own in lanes if own.steps
    ]
    return min(last, steps * max(typical, default=last))


def _places(lanes: Sequence[WorkerLanes]) -> dict[tuple[int, int], tuple[str, float]]:
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


def _messages(own: WorkerLanes, at: dict[int, float], window: float) -> Iterator[plots.Arrow]:
    """Yield an arrow for each message between two lanes that is sent and read within the window."""
    for message in own.arrows:
        sent, read = _ms(own, message.sent), _ms(own, message.read)
        if sent >= 0 and read <= window and {message.sender, message.receiver} <= at.keys():
            start, end = at[message.sender], at[message.receiver]
            side = _BAR / 2 if end > start else -_BAR / 2
            yield plots.Arrow((sent, start + side), (read, end - side))


def _ends_of_steps(own: WorkerLanes, at: float, window: float, wide: float) -> Iterator[plots.Mark]:
    """Yield the ends of steps, and how many tokens each committed where that can be read.

    Args:
        wide: width of the axes in inches.
    """
    taken = -_ROOM_IN
    ends = [(_ms(own, step.end), step.committed) for step in own.steps]
    ends = [(end, committed) for end, committed in ends if end <= window]
    boxes = [plots.Box(end, at + _BAR / 2, 0, 0.13) for end, _ in ends]
    yield plots.Bars(boxes, style.INK, edge=style.INK, line=0.5)
    for end, committed in ends:
        inches = end * wide / window
        if inches - taken >= _ROOM_IN and inches >= _ROOM_IN / 2:
            taken, y = inches, at + _BAR / 2 + 0.08
            yield plots.Note(str(committed), end, y, 5, style.MUTED, ha="right", va="top")
