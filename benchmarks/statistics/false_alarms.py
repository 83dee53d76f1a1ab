"""Simulates how often the timing gate is wrong or right, for docs/explanations/statistics.md.

python benchmarks/statistics/false_alarms.py [comparisons]
"""

from __future__ import annotations

import math
import sys
from functools import partial
from statistics import median

import numpy as np

from specbench_cli.stats.simulated_sides import BAD, QUIET, Sides, alarms, compared

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
                f"{math.expm1(median(s.detects for f in clean if (s := f[figure, 0]))):.0%}"
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
