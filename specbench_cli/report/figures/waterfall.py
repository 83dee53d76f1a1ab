"""Figure of what reduces the ideal speedup of a method to the measured one.

If a step took as long as a vanilla step, the speedup would be MAT. Let V and M be the decode times
of vanilla and of the method on the same outputs. V and M are each the sum of the times of target
forwards (verify), drafting (draft) and the rest (host). Let s be the method's number of steps
divided by vanilla's number of steps. The speedup that remains after each part is:

    ideal          1 / s                                     = MAT
    verify         V / (s V + verify_M - s verify_V)         a step verifies several tokens
    draft          V / (s V + ... + draft_M)
    host           V / (s V + ... + host_M - s host_V)
    overlap        V / M                                     several workers compute at once
    prefill        the ratio of whole outputs, without the time for learning
    learn          with learning: the speedup of the table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.store.schema import Record
from specbench_cli.summary import formats

_LOOKS = {
    part: style.PARTS[part] for part in ("verify", "draft", "host", "overlap", "prefill", "learn")
} | {"measured": (style.REFERENCE, None)}
_ROW_IN = 0.42
_ROW, _STAIRS, _BAR, _BAR_AT = 0.88, 0.55, 0.3, 0.28
"""Used height of a row, height of the stairs, height and offset of the measured bar, in rows."""
_OVERLAP = 1e-3
"""Minimum overlap of workers, as a share of decode time. Less is rounding of the timer."""


@dataclass(frozen=True, slots=True)
class SpeedupLosses:
    """The ideal speedup of a method, and how much of it remains after each part of a step.

    Attributes:
        remaining: Part, such as "draft" -> speedup that remains after this part.
    """

    label: str
    ideal: float
    remaining: dict[str, float]

    @property
    def measured(self) -> float:
        """Speedup of the method in the report's table. It remains after all parts."""
        return list(self.remaining.values())[-1]


def compute_losses(data: FigureData) -> list[SpeedupLosses]:
    """Return the losses of the methods with known steps and times, in the order of the table."""
    found = []
    for row in data.with_speedup:
        pairs = [pair for pair in data.pairs(row.label) if all(map(_has_times, pair))]
        if pairs and row.mat is not None and row.mat != 1:
            found.append(_compute_method_losses(row.label, pairs))
    return found


def draw(data: FigureData) -> plots.Figure | None:
    """Return the figure, or None if no method has separate times for verify, draft and host."""
    found = compute_losses(data)
    if not found:
        return None
    marks: list[plots.Mark] = [plots.RuleLine(x=1)]
    boxes: dict[str, list[plots.BarBox]] = {part: [] for part in _LOOKS}
    for place, losses in enumerate(found):
        y, height, before = place - 0.5 * _ROW, _STAIRS / len(losses.remaining), losses.ideal
        start = [plots.PlotPoint(before, y), plots.PlotPoint(before, y + height)]
        marks.append(plots.PlotSeries(start, style.Look(marker="", width=1.1)))
        stairs = style.TINY, style.MUTED, (2, 0)
        marks.append(plots.Note(formats.ratio(before), before, y + height / 2, *stairs))
        for part, after in losses.remaining.items():
            boxes[part].append(plots.BarBox(after, y, before - after, height))
            before, y = after, y + height
        y = place + _BAR_AT
        boxes["measured"].append(plots.BarBox(0, y - _BAR / 2, losses.measured, _BAR))
        measured = 6.5, style.INK, (2, 0)
        marks.append(
            plots.Note(formats.ratio(losses.measured), losses.measured, y, *measured, halo=1.4)
        )
    marks += [plots.PlotBars(own, *_LOOKS[part], part) for part, own in boxes.items() if own]
    longest = max(max(losses.ideal, *losses.remaining.values()) for losses in found)
    name = "speedup: from MAT down to the measured one"
    panel = plots.Panel(marks, plots.Axis(name, 0, 1.12 * longest, style.format_ratio))
    names = [(losses.label, place) for place, losses in enumerate(found)]
    return plots.row_plot(names, [panel], _ROW_IN, columns=len(_LOOKS))


def _has_times(record: Record) -> bool:
    ns = record.ns
    times = (ns.prefill, ns.decode, ns.draft, ns.verify, ns.host)
    return None not in times and (record.n_tokens or 0) > 1 and record.steps is not None


def _compute_method_losses(label: str, pairs: Sequence[tuple[Record, Record]]) -> SpeedupLosses:
    plain = dict.fromkeys(("total", "decode", "verify", "host"), 0.0)
    own = dict.fromkeys(("total", "decode", "verify", "host", "draft"), 0.0)
    steps = tokens = learn = 0
    for vanilla, method in pairs:
        assert vanilla.n_tokens is not None
        assert method.n_tokens is not None
        assert method.steps is not None
        share = (method.n_tokens - 1) / (vanilla.n_tokens - 1)
        for part in plain:
            whole = method.n_tokens / vanilla.n_tokens if part == "total" else share
            plain[part] += whole * getattr(vanilla.ns, part)
        for part in own:
            own[part] += getattr(method.ns, part)
        learn += method.ns.learn or 0
        steps += len(method.steps.levels)
        tokens += method.n_tokens - 1
    s = steps / tokens
    overlap = own["verify"] + own["draft"] + own["host"] - own["decode"]
    costs = {
        "verify": own["verify"] - s * plain["verify"],
        "draft": own["draft"],
        "host": own["host"] - s * plain["host"],
    }
    if overlap > _OVERLAP * own["decode"]:
        costs["overlap"] = -overlap
    spent, left = s * plain["decode"], {}
    for part, cost in costs.items():
        spent += cost
        left[part] = plain["decode"] / spent
    left["prefill"] = plain["total"] / (own["total"] - learn)
    if learn:
        left["learn"] = plain["total"] / own["total"]
    return SpeedupLosses(label, 1 / s, left)
