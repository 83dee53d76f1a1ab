"""Measure the accuracy of the ETA that a run reports.

    python benchmarks/times/time_left.py -m sps,pld -- --repeats 2 -- --target embedded-1m

Run `specbench run --json` once with each group of arguments (groups are separated by `--`). Print
for each the ratio of the reported ETA to the true remaining time: minimum, median and maximum over
the moments of its updates, and over all moments, a tenth of a second apart, at which it was shown.
Both start at the second prompt. After the last prompt, the ETA belongs to a stage.
"""

# ruff: noqa: T201

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from statistics import median

STEP_S = 0.1


def run_and_collect(
    args: list[str], out: Path
) -> tuple[list[tuple[float, dict[str, object]]], float]:
    """Run specbench; return its events with the seconds since the start, and the total seconds."""
    program = [sys.executable, "-m", "specbench_cli", "run", "--json", "--out", str(out), *args]
    start = time.monotonic()
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    events = [(time.monotonic() - start, json.loads(line)) for line in process.stdout]
    process.wait()
    return events, time.monotonic() - start


def eta_ratios(
    events: list[tuple[float, dict[str, object]]], end: float
) -> tuple[list[float], list[float]]:
    """Return the ratios of ETA to remaining time, at the updates and at all moments."""
    shown = [(at, event) for at, event in events if event["event"] in ("prompt", "stage")]
    at_updates, at_all_times = [], []
    second = False
    for (at, event), (until, _) in zip(shown, [*shown[1:], (end, {})], strict=True):
        left = event.get("left_s")
        second = second or (event["event"] == "prompt" and int(str(event["prompt"])) >= 2)
        if not second or left is None:
            continue
        at_updates.append(float(str(left)) / (end - at))
        steps = int((until - at) / STEP_S) + 1
        at_all_times += [float(str(left)) / (end - at - step * STEP_S) for step in range(steps)]
    return at_updates, at_all_times


def main() -> None:
    """Run each group of arguments and print its ratios."""
    groups = [list(words) for bar, words in groupby(sys.argv[1:], lambda w: w == "--") if not bar]
    for args in groups or [[]]:
        with tempfile.TemporaryDirectory() as folder:
            events, end = run_and_collect(args, Path(folder) / "run")
        print(f"{' '.join(args) or 'default'}: {end:.0f} s")
        for name, found in zip(("updates", "all moments"), eta_ratios(events, end), strict=True):
            low, mid, high = min(found), median(found), max(found)
            print(f"  {name:<12} n {len(found):4}  {low:.2f} {mid:.2f} {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
