"""Is a draft found that is 8% slower? Real runs that take turns, of a program with such a draft.

    python tests/benchmarks/slower_draft.py FOLDER --rounds 10

Programs: `base` and `again` are this one as it is; in `sleep` every forward of the draft sleeps for a
share of its time, in `spin` it keeps the processor for that share (a sleep costs more than it
lasts: what comes after it is slower). Each round runs all four, every second one backwards; then
base is compared with each of the others. Needs a quiet machine; resumes where it was stopped.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("base", "again", "sleep", "spin")
RUN = ("run", "-m", "sps,hf:vanilla", "--limit", "6", "--max-new-tokens", "32", "--threads", "1")
_PR_SET_TIMERSLACK = 29
_OVERHEAD_NS = 3_500
"""Of the shortest sleep, once the kernel does not round it up by 50 us."""


def main() -> None:
    """Run all programs in turn, compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slower", type=float, default=0.08, help="share of a draft forward")
    args = parser.parse_args()
    for number in range(1, args.rounds + 1):
        for program in PROGRAMS if number % 2 else reversed(PROGRAMS):
            out = args.folder / program / f"{number:02}"
            if not (out / "summary.csv").exists():
                code = subprocess.call(
                    [sys.executable, "-P", __file__, program, str(args.slower), *RUN]
                    + ["--out", str(out)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                print(f"{program} {number}: exit code {code}", flush=True)
    for program in PROGRAMS[1:]:
        print(f"\nspecbench compare base {program}", flush=True)
        sides = [str(args.folder / name) for name in ("base", program)]
        subprocess.call([sys.executable, "-m", "specbench_cli", "compare", *sides])


def run(program: str, slower: float, args: list[str]) -> None:
    """Be one of the programs."""
    from specbench_cli.app import main as specbench
    from specbench_cli.engine.fused import FusedStack

    waits: dict[str, Callable[[int], None]] = {"sleep": _sleep, "spin": _spin}
    if wait := waits.get(program):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        forward = FusedStack.forward

        def slowed(self: FusedStack, *given: Any, **named: Any) -> Any:
            began = time.perf_counter_ns()
            out = forward(self, *given, **named)
            if self.name == "draft":
                wait(round((time.perf_counter_ns() - began) * slower))
            return out

        FusedStack.forward = slowed  # type: ignore[method-assign]
    specbench(args)


def _sleep(ns: int) -> None:
    time.sleep(max(0, ns - _OVERHEAD_NS) / 1e9)


def _spin(ns: int) -> None:
    end = time.perf_counter_ns() + ns
    while time.perf_counter_ns() < end:
        pass


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PROGRAMS:
        run(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    else:
        main()
