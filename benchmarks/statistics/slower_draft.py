"""Check that a comparison detects a draft model that is 8% slower, in real runs.

    python benchmarks/statistics/slower_draft.py FOLDER --rounds 8

Variants of the program: `same` is unchanged. In `sleep` each draft forward sleeps for a share of
its time. In `spin` it keeps the CPU busy for that share, because code after a sleep is slower too.
Each round runs the base and each variant by turns; the last step compares them. The script needs a
quiet machine, and resumes a stopped series.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("same", "sleep", "spin")
RUN = ("run", "-m", "sps", "--limit", "12", "--max-new-tokens", "32", "--threads", "1")
ATTEMPTS = 3
_PR_SET_TIMERSLACK = 29
_OVERHEAD_NS = 3_500
"""Overhead of the shortest sleep, without the kernel's rounding up by 50 us."""


def main() -> None:
    """Run all variants by turns with the base, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--slower", type=float, default=0.08, help="share of a draft forward")
    args = parser.parse_args()
    for number in range(1, args.rounds + 1):
        for program in PROGRAMS:
            run_round(args.folder / program, number, program, args.slower)
    for program in PROGRAMS:
        print(f"\nspecbench compare base {program}", flush=True)
        sides = [str(args.folder / program / name) for name in ("base", "new")]
        subprocess.call([sys.executable, "-m", "specbench_cli", "compare", *sides])


def run_round(folder: Path, number: int, program: str, slower: float) -> None:
    """Run one round of the base and a variant, up to three times if it is noisy.

    The one that starts first alternates between rounds.
    """
    if (folder / f"done {number}").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sides = [("base", "same"), ("new", program)]
    for _ in range(ATTEMPTS):
        processes = []
        for name, variant in sides if number % 2 else reversed(sides):
            out = folder / name / f"{number:02}"
            shutil.rmtree(out, ignore_errors=True)
            words = [
                variant,
                str(slower),
                *RUN,
                "--in-turn",
                str(folder / "turns"),
                "--out",
                str(out),
            ]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen([sys.executable, "-P", __file__, *words], **quiet))
        codes = [process.wait() for process in processes]
        print(f"{program} {number}: exit codes {codes}", flush=True)
        if codes == [0, 0]:
            break
    (folder / f"done {number}").touch()


def run(program: str, slower: float, args: list[str]) -> None:
    """Run specbench as one of the variants."""
    from specbench_cli.app import main as specbench
    from specbench_cli.engine.models.fused import FusedStack

    waits: dict[str, Callable[[int], None]] = {"sleep": _sleep, "spin": _spin}
    if wait := waits.get(program):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        forward = FusedStack.forward

        def slow_forward(self: FusedStack, *args_: Any, **named: Any) -> Any:
            start = time.perf_counter_ns()
            out = forward(self, *args_, **named)
            if self.name == "draft":
                wait(round((time.perf_counter_ns() - start) * slower))
            return out

        FusedStack.forward = slow_forward  # type: ignore[method-assign]
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
