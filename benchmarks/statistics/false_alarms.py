"""Simulate false alarms and detections of the timing gate of `specbench compare`.

    python benchmarks/statistics/false_alarms.py [comparisons]

The script prints the table in docs/explanations/statistics.md.
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
"""Shares of a method's decoding time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseModel:
    """Noise of measured times. Spreads are standard deviations of logarithms.

    Attributes:
        output: spread of an output's time, common to its components.
        part: additional spread of each component.
        drift: spread of a component of one method between processes.
        phase: spread of the machine's speed between processes.
        hiccup: probability that an output is slowed down.
        hiccup_mean: mean of the slowdown, which is exponentially distributed on the log scale.
        noisy: probability that the time of an output is noisy, and so not used.
    """

    output: float
    part: float
    drift: float
    phase: float
    hiccup: float = 0.02
    hiccup_mean: float = 0.3
    noisy: float = 0.02


QUIET = NoiseModel(output=0.0165, part=0.011, drift=0.005, phase=0.01)
"""Times repeat within 2%. Ratios of two components or methods drift by 1% between processes."""
BAD = NoiseModel(output=0.09, part=0.05, drift=0.04, phase=0.2, hiccup=0.1, noisy=0.03)
"""A virtual machine in a bad phase, as measured in twelve runs of the same program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSize:
    """Size of a comparison.

    Attributes:
        drafting: number of methods with a draft model.
        processes: number of processes on each side.
    """

    rows: int = 5
    drafting: int = 3
    prompts: int = 7
    processes: int = 1


def simulate_comparison(
    machine: NoiseModel,
    size: ComparisonSize,
    rng: np.random.Generator,
    *,
    draft: float = 1.0,
    method: float = 1.0,
    tolerance: float = 0.05,
) -> dict[tuple[str, int], SlowdownEstimate | None]:
    """Simulate one comparison and return the change of each figure and method.

    Args:
        machine: noise of the times.
        size: numbers of methods, prompts and processes.
        draft: slowdown of draft forwards in NEW, for all methods with a draft model.
        method: slowdown of method 0 in NEW.
        tolerance: allowed slowdown, 0.05 for 5%.
    """
    new = np.arange(2 * size.processes) >= size.processes
    speed = rng.normal(0, machine.phase, len(new))
    vanilla = _noise(machine, size, rng) + rng.normal(0, machine.drift, len(new))
    speed_difference = float(speed[new].mean() - speed[~new].mean())
    series: dict[tuple[str, int], RegressionSeries] = {}
    for row in range(size.rows):
        common = _noise(machine, size, rng)
        parts = {
            name: common
            + rng.normal(0, machine.part, common.shape)
            + rng.normal(0, machine.drift, len(new))
            + (math.log(method) * new if row == 0 else 0.0)
            for name in _SHARES
            if name != "draft" or row < size.drafting
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
            series[name, row] = RegressionSeries(name, values, new, speed_difference)
    found = estimate_slowdowns(list(series.values()), tolerance=math.log1p(tolerance))
    return dict(zip(series, found, strict=True))


def find_slowdowns(
    found: dict[tuple[str, int], SlowdownEstimate | None], tolerance: float = 0.05
) -> list[tuple[str, int]]:
    """Return the figures and methods that a comparison reports as slower."""
    return [
        key
        for key, shift in found.items()
        if shift is not None and shift.low > 0 and shift.log_ratio > math.log1p(tolerance)
    ]


def _noise(machine: NoiseModel, size: ComparisonSize, rng: np.random.Generator) -> Floats:
    """Return the noise of outputs [prompts, processes], nan if the time is noisy."""
    shape = size.prompts, 2 * size.processes
    noise = rng.normal(0, machine.output, shape)
    noise += (rng.random(shape) < machine.hiccup) * rng.exponential(machine.hiccup_mean, shape)
    noise[rng.random(shape) < machine.noisy] = np.nan
    return noise


SHAPES = ((3, 1), (7, 1), (12, 1), (24, 1), (7, 3), (12, 3))
MACHINES = {"quiet": QUIET, "bad": BAD}


def main() -> None:
    """Print the table as Markdown."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    write_line("| machine | prompts | processes | false alarm | draft 8% | method 8% | detects |")
    write_line("| --- | --- | --- | --- | --- | --- | --- |")
    for name, machine in MACHINES.items():
        for prompts, processes in SHAPES:
            size = ComparisonSize(prompts=prompts, processes=processes)
            once = partial(simulate_comparison, machine, size, np.random.default_rng(prompts))
            clean = [once() for _ in range(n)]
            false = sum(bool(find_slowdowns(found)) for found in clean)
            draft = sum(
                any(figure == "draft forward" for figure, _ in find_slowdowns(once(draft=1.08)))
                for _ in range(n // 4)
            )
            method = sum(
                any(row == 0 for _, row in find_slowdowns(once(method=1.08))) for _ in range(n // 4)
            )
            smallest = " / ".join(
                f"{math.expm1(median(s.detectable for f in clean if (s := f[figure, 0]))):.0%}"
                for figure in ("decode", "draft forward")
            )
            write_line(
                f"| {name} | {prompts} | {processes} | {false} of {n}"
                f" | {draft / (n // 4):.0%} | {method / (n // 4):.0%} | {smallest} |"
            )


def write_line(line: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
