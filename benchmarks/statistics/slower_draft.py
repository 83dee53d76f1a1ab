"""Is a draft found that is 8% slower? Real runs that take turns, of a program with such a draft.

    python benchmarks/statistics/slower_draft.py FOLDER --rounds 8

Programs: `same` is this one as it is; in `sleep` every forward of the draft sleeps for a share of
its time, in `spin` it keeps the processor for that share (a sleep costs more than it lasts: what
comes after it is slower). Each round runs base and each of the others in turn; then they are
compared. Needs a machine that is as quiet as for any run; resumes where it was stopped.
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
"""Of the shortest sleep, once the kernel does not round it up by 50 us."""


def main() -> None:
    """Run all programs in turn with base, compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--slower", type=float, default=0.08, help="share of a draft forward")
    args = parser.parse_args()
    for number in range(1, args.rounds + 1):
        for program in PROGRAMS:
            both(args.folder / program, number, program, args.slower)
    for program in PROGRAMS:
        print(f"\nspecbench compare base {program}", flush=True)
        sides = [str(args.folder / program / name) for name in ("base", "new")]
        subprocess.call([sys.executable, "-m", "specbench_cli", "compare", *sides])


def both(folder: Path, number: int, program: str, slower: float) -> None:
    """One round of base and a program, who starts first alternating; again where it was noisy."""
    if (folder / f"done {number}").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sides = [("base", "same"), ("new", program)]
    for _ in range(ATTEMPTS):
        started = []
        for name, of in sides if number % 2 else reversed(sides):
            out = folder / name / f"{number:02}"
            shutil.rmtree(out, ignore_errors=True)
            words = [of, str(slower), *RUN, "--in-turn", str(folder / "turns"), "--out", str(out)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen([sys.executable, "-P", __file__, *words], **quiet))
        codes = [one.wait() for one in started]
        print(f"{program} {number}: exit codes {codes}", flush=True)
        if codes == [0, 0]:
            break
    (folder / f"done {number}").touch()


def run(program: str, slower: float, args: list[str]) -> None:
    """Be one of the programs."""
    from specbench_cli.app import main as specbench
    from specbench_cli.engine.models.fused import FusedStack

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
