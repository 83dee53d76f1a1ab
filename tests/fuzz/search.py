"""Does any input end in a traceback, a hang, or a value that cannot be?

    python tests/fuzz                          # half a minute; the same inputs everywhere
    python tests/fuzz --inputs 20000 --first 5000
    python tests/fuzz --of records,manifests --inputs 1000000 --seconds 600
    python tests/fuzz --of records --only 4711  # one input again, with its traceback

Input N of a class is the same on every machine. A finding is an exception that is no error of ours,
a program that hangs, or an accepted value that cannot be. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from types import FrameType

from models import Checkpoints, Ggufs, Heads
from sinks import Sinks
from subjects import Baselines, Manifests, Prompts, Records, Subject
from words import Arguments, Configs, CostFiles, Questions, Tasks

SUBJECTS: dict[str, type[Subject]] = {
    subject.name: subject
    for subject in (
        *(Records, Prompts, Manifests, Baselines),
        *(Configs, Tasks, Questions, CostFiles, Arguments, Sinks),
        *(Checkpoints, Heads, Ggufs),
    )
}
LIMIT_S = 20.0
"""Limit of processor time in seconds. No input should take as long."""
WAITING_S = 300.0
"""Limit of wall-clock time in seconds, for inputs that wait."""


class Hang(BaseException):
    """Timeout of an input. It is no `Exception`, so that no handler catches it."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise Hang


def trial(subject: Subject, number: int) -> tuple[bool, str | None]:
    """Return whether input `number` was accepted, and an error message or None."""
    rng = Random(f"{subject.name} {number}")
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAITING_S)
    try:
        return subject.trial(rng)
    except Hang:
        return False, f"hangs for {LIMIT_S:g} s of processor time, or {WAITING_S:g} s"
    except Exception as fault:
        frames = traceback.extract_tb(fault.__traceback__)
        own = [f for f in frames if "specbench_cli" in f.filename] or frames
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return False, f"{type(fault).__name__} at {at}: {str(fault)[:160]!r}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def search(subject: Subject, first: int, inputs: int, seconds: float) -> Counter[str]:
    """Try inputs, print the findings, and count them by message without numbers."""
    found: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)
    accepted, began, number = 0, time.monotonic(), first
    while number < first + inputs and time.monotonic() - began < seconds:
        fine, wrong = trial(subject, number)
        accepted += fine
        if wrong is not None:
            kind = wrong.partition(": ")[0]
            if not found[kind]:
                print(f"  {subject.name} {number}: {wrong}", flush=True)  # noqa: T201
            found[kind] += 1
        number += 1
    print(  # noqa: T201
        f"{subject.name}: {number - first} inputs, {accepted} accepted, {found.total()} findings"
        f" of {len(found)} kinds",
        flush=True,
    )
    return found


def main() -> None:
    """Search the requested classes of inputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", default=",".join(SUBJECTS), help="classes, separated by commas")
    parser.add_argument("--inputs", type=int, help="of each class; without it as many as it says")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all classes")
    parser.add_argument("--only", type=int, help="one input, and its traceback")
    options = parser.parse_args()
    names = options.of.split(",")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        total = 0
        for name in names:
            subject = SUBJECTS[name](Path(folder) / name)
            if options.only is not None:
                print(subject.trial(Random(f"{name} {options.only}")))  # noqa: T201
                continue
            each = options.seconds / len(names)
            inputs = subject.inputs if options.inputs is None else options.inputs
            total += search(subject, options.first, inputs, each).total()
    sys.exit(1 if total else 0)
