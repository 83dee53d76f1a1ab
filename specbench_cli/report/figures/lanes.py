"""Timeline of a few steps of an output, with one lane per worker.

A box is a forward. Its colour is the purpose (draft, verify, ...), and its height the share of the
model's layers that it runs. An arrow is a message between workers. A mark below a lane is the end
of a step, with the number of committed tokens. Time starts at the end of prefill. A method that
learns between requests has a further lane for learning. This lane is not to scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from specbench_cli.predict.lanes import WorkerLanes, make_lanes
from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData

_LOOKS = {role: style.PARTS[role] for role in ("prefill", "draft", "verify", "aux", "learn")} | {
    "unused": ("white", "xxxxxx")
}
"""Colour and hatching by the purpose of a forward."""
_EDGE = dict.fromkeys(_LOOKS, "white") | {"unused": style.MUTED}
_LANE_IN, _BAR, _NUMBER_IN = 0.24, 0.5, 0.11
"""Height of a lane in inches, height of a forward in lanes, width of a step's number in inches."""
_LEARNING, _LEARNING_WIDTH = -1, 0.06
"""Key of the lane for learning, in place of a worker's number, and its share of the width."""
_LOWEST = 0.3
"""Minimum height of a partial forward, relative to a full one."""
_STEPS = 4
"""Number of steps in the figure of a report, for the method with the longest steps."""


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure for the first prompt of a run, or None if the records have no traces."""
    order = {label: place for place, label in enumerate(data.records)}
    records = sorted(data.traced, key=lambda record: order[record.label])
    return draw_lanes([make_lanes(record) for record in records], style.COLUMN_IN, _STEPS)


def draw_lanes(lanes: Sequence[WorkerLanes], width: float, steps: int) -> plots.Figure | None:
    """Return the figure of the first steps of some outputs.

    Args:
        width: Width of the figure in inches.
        steps: Number of steps to draw for the output with the longest steps. Other outputs may show
            more.

    Returns:
        None if no output has forwards after its prefill.
    """
    lanes = [own for own in lanes if own.decoding]
    if not lanes:
        return None
    window = _window(lanes, steps)
    places = _lane_positions(lanes)
    names = list(places.values())
    width_in = plots.row_width([name for name, _ in names], width)
    boxes: dict[str, list[plots.BarBox]] = {look: [] for look in _LOOKS}
    marks: list[plots.Mark] = []
    for place, own in enumerate(lanes):
        at = {worker: places[place, worker][1] for worker in own.workers}
        marks += [plots.RuleLine(y=y, colour=style.FAINT, zorder=0) for y in at.values()]
        marks += _messages(own, at, window)
        marks += _ends_of_steps(own, max(at.values()), window, width_in)
        for forward in own.decoding:
            start, end = (_ms(own, when) for when in (forward.start, forward.end))
            if start < window:
                height = _BAR * (_LOWEST + (1 - _LOWEST) * forward.share)
                y = at[forward.worker] + _BAR / 2 - height
                look = forward.role if forward.used else "unused"
                boxes[look].append(plots.BarBox(start, y, end - start, height))
        if own.learn:
            y, length = places[place, _LEARNING][1], _LEARNING_WIDTH * window
            boxes["learn"].append(plots.BarBox(-length, y - _BAR / 2, length, _BAR))
            words = f" {own.learn / 1e6:.3g} ms, before prefill"
            marks.append(plots.Note(words, 0, y, style.TINY, style.MUTED))
    marks += [
        plots.PlotBars(own, *_LOOKS[look], look, _EDGE[look], 0.1)
        for look, own in boxes.items()
        if own
    ]
    begin = -_LEARNING_WIDTH * window if boxes["learn"] else 0.0
    x = plots.Axis(f"ms of decoding, {lanes[0].prompt_id}", begin, window)
    panel = plots.Panel(marks, x)
    return plots.row_plot(names, [panel], _LANE_IN, width=width, columns=len(_LOOKS))


def _ms(own: WorkerLanes, when: float) -> float:
    """Return the time since the end of prefill in milliseconds."""
    return (when - own.prefill) / 1e6


def _window(lanes: Sequence[WorkerLanes], steps: int) -> float:
    """Return the time to draw in milliseconds: enough for `steps` steps of the slowest output."""
    last = max(_ms(own, own.decoding[-1].end) for own in lanes)
    typical = [
        median(step.end - step.start for step in own.steps) / 1e6 for own in lanes if own.steps
    ]
    return min(last, steps * max(typical, default=last))


def _lane_positions(lanes: Sequence[WorkerLanes]) -> dict[tuple[int, int], tuple[str, float]]:
    """Return (index of the output, worker) -> (name, y position) of each lane."""
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
    """Yield an arrow for each message that is sent and read within the drawn time."""
    for message in own.arrows:
        sent, read = _ms(own, message.sent), _ms(own, message.read)
        if sent >= 0 and read <= window and {message.sender, message.receiver} <= at.keys():
            start, end = at[message.sender], at[message.receiver]
            side = _BAR / 2 if end > start else -_BAR / 2
            yield plots.Arrow((sent, start + side), (read, end - side))


def _ends_of_steps(
    own: WorkerLanes, at: float, window: float, width_in: float
) -> Iterator[plots.Mark]:
    """Yield a mark at the end of each step, with the number of committed tokens if it fits.

    Args:
        width_in: Width of the axes in inches.
    """
    taken = -_NUMBER_IN
    ends = [(_ms(own, step.end), step.committed) for step in own.steps]
    ends = [(end, committed) for end, committed in ends if end <= window]
    boxes = [plots.BarBox(end, at + _BAR / 2, 0, 0.13) for end, _ in ends]
    yield plots.PlotBars(boxes, style.INK, edge=style.INK, line=0.5)
    for end, committed in ends:
        inches = end * width_in / window
        if inches - taken >= _NUMBER_IN and inches >= _NUMBER_IN / 2:
            taken, y = inches, at + _BAR / 2 + 0.08
            yield plots.Note(str(committed), end, y, 5, style.MUTED, ha="right", va="top")
