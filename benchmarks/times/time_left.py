"""How right the time left is that a run says: what was said against what it took.

    python benchmarks/times/time_left.py -m sps,pld -- --repeats 2 -- --target embedded-1m

Runs `specbench run --json` with each of the groups of arguments, and prints for each the ratio of
the time said to the time that was truly left until the process was gone: its least, median and most
over the moments at which it was said, and over all moments, a tenth of a second apart, at which it
stood there. Both begin with the second prompt. What stands after the last prompt is a stage.
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


def events(args: list[str], out: Path) -> tuple[list[tuple[float, dict[str, object]]], float]:
    """What a run says, with the seconds since its start, and the seconds until its end."""
    program = [sys.executable, "-m", "specbench_cli", "run", "--json", "--out", str(out), *args]
    begun = time.monotonic()
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [(time.monotonic() - begun, json.loads(line)) for line in process.stdout]
    process.wait()
    return said, time.monotonic() - begun


def ratios(
    said: list[tuple[float, dict[str, object]]], end: float
) -> tuple[list[float], list[float]]:
    """Time said to time left, at the moments of saying and at all moments."""
    spans = [(at, event) for at, event in said if event["event"] in ("prompt", "stage")]
    when, always = [], []
    second = False
    for (at, event), (until, _) in zip(spans, [*spans[1:], (end, {})], strict=True):
        left = event.get("left_s")
        second = second or (event["event"] == "prompt" and int(str(event["prompt"])) >= 2)
        if not second or left is None:
            continue
        when.append(float(str(left)) / (end - at))
        steps = int((until - at) / STEP_S) + 1
        always += [float(str(left)) / (end - at - step * STEP_S) for step in range(steps)]
    return when, always


def main() -> None:
    """Print a line a run."""
    groups = [list(words) for bar, words in groupby(sys.argv[1:], lambda w: w == "--") if not bar]
    for args in groups or [[]]:
        with tempfile.TemporaryDirectory() as folder:
            said, end = events(args, Path(folder) / "run")
        print(f"{' '.join(args) or 'default'}: {end:.0f} s")
        for name, found in zip(("when said", "all moments"), ratios(said, end), strict=True):
            low, mid, high = min(found), median(found), max(found)
            print(f"  {name:<12} n {len(found):4}  {low:.2f} {mid:.2f} {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
