"""Simulates how often the timing gate is wrong or right, for docs/explanations/statistics.md.

python benchmarks/statistics/false_alarms.py [comparisons]
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from specbench_cli.stats.regression import RegressionSeries, SlowdownEstimate, estimate_slowdowns
from specbench_cli.stats.two_way import Floats

_SHARES = {"verify": 0.6, "draft": 0.3, "host": 0.1}
"""Of a method's decoding time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How times scatter; all spreads are standard deviations of logarithms.

    cell: of an output's time, common to its components. part: of each of its components besides.
    drift: of each component of a row between processes. phase: of the whole machine's speed
    between processes. hiccup: how often an output is slowed down, exponentially distributed with
    mean `by` on the logarithm. lost: how often it is void.
    """

    cell: float
    part: float
    drift: float
    phase: float
    hiccup: float = 0.02
    by: float = 0.3
    lost: float = 0.02


QUIET = Machine(cell=0.0165, part=0.011, drift=0.005, phase=0.01)
"""Cells repeat to 2%, ratios of two components or rows drift by 1% between two processes."""
BAD = Machine(cell=0.09, part=0.05, drift=0.04, phase=0.2, hiccup=0.1, lost=0.03)
"""A virtual machine in a bad phase: what twelve runs of the same program showed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What is compared. drafting: how many of the rows have a draft. processes: on each side."""

    rows: int = 5
    drafting: int = 3
    prompts: int = 7
    processes: int = 1


def compared(
    machine: Machine,
    sides: Sides,
    rng: np.random.Generator,
    *,
    draft: float = 1.0,
    method: float = 1.0,
    tolerance: float = 0.05,
) -> dict[tuple[str, int], SlowdownEstimate | None]:
    """One comparison: by figure and row, its change.

    Args:
        draft: how much slower draft forwards are on NEW's side, in every row that drafts.
        method: how much slower all of row 0 is on NEW's side.
    """
    new = np.arange(2 * sides.processes) >= sides.processes
    speed = rng.normal(0, machine.phase, len(new))
    vanilla = _cells(machine, sides, rng) + rng.normal(0, machine.drift, len(new))
    apart = float(speed[new].mean() - speed[~new].mean())
    series: dict[tuple[str, int], RegressionSeries] = {}
    for row in range(sides.rows):
        cell = _cells(machine, sides, rng)
        parts = {
            name: cell
            + rng.normal(0, machine.part, cell.shape)
            + rng.normal(0, machine.drift, len(new))
            + (math.log(method) * new if row == 0 else 0.0)
            for name in _SHARES
            if name != "draft" or row < sides.drafting
        }
        if "draft" in parts:
            parts["draft"] = parts["draft"] + math.log(draft) * new
        whole = sum(_SHARES[name] for name in parts)
        decode = np.log(sum(_SHARES[name] / whole * np.exp(part) for name, part in parts.items()))
        figures: dict[str, Floats] = {
            "decode": decode - vanilla,
            "verify forward": parts["verify"] - vanilla,
            "host": parts["host"] - parts["verify"],
        }
        if "draft" in parts:
            figures["draft forward"] = parts["draft"] - parts["verify"]
        for name, values in figures.items():
            series[name, row] = RegressionSeries(name, values, new, apart)
    found = estimate_slowdowns(list(series.values()), tolerance=math.log1p(tolerance))
    return dict(zip(series, found, strict=True))


def alarms(
    found: dict[tuple[str, int], SlowdownEstimate | None], tolerance: float = 0.05
) -> list[tuple[str, int]]:
    """What a comparison calls slower."""
    return [
        key
        for key, shift in found.items()
        if shift is not None and shift.low > 0 and shift.log_ratio > math.log1p(tolerance)
    ]


def _cells(machine: Machine, sides: Sides, rng: np.random.Generator) -> Floats:
    """Noise of outputs [prompts, processes]; nan where void."""
    shape = sides.prompts, 2 * sides.processes
    noise = rng.normal(0, machine.cell, shape)
    noise += (rng.random(shape) < machine.hiccup) * rng.exponential(machine.by, shape)
    noise[rng.random(shape) < machine.lost] = np.nan
    return noise


SHAPES = ((3, 1), (7, 1), (12, 1), (24, 1), (7, 3), (12, 3))
MACHINES = {"quiet": QUIET, "bad": BAD}


def main() -> None:
    """Print the table, as Markdown."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    say("| machine | prompts | processes | false alarm | draft 8% | method 8% | detects |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for name, machine in MACHINES.items():
        for prompts, processes in SHAPES:
            sides = Sides(prompts=prompts, processes=processes)
            once = partial(compared, machine, sides, np.random.default_rng(prompts))
            clean = [once() for _ in range(n)]
            false = sum(bool(alarms(found)) for found in clean)
            draft = sum(
                any(figure == "draft forward" for figure, _ in alarms(once(draft=1.08)))
                for _ in range(n // 4)
            )
            method = sum(
                any(row == 0 for _, row in alarms(once(method=1.08))) for _ in range(n // 4)
            )
            smallest = " / ".join(
                f"{math.expm1(median(s.detectable for f in clean if (s := f[figure, 0]))):.0%}"
                for figure in ("decode", "draft forward")
            )
            say(
                f"| {name} | {prompts} | {processes} | {false} of {n}"
                f" | {draft / (n // 4):.0%} | {method / (n // 4):.0%} | {smallest} |"
            )


def say(line: str) -> None:
    """A line of the report, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
