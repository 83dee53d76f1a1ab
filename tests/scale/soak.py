"""Memory of a long run: one ordinary run over prompts without end, its processes' memory beside it.

    python tests/scale/soak.py FOLDER --seconds 3600

The embedded pair answers texts made of `mini`'s questions, each of another length, by methods
without a model, with a draft model, with a head and with a memory. With `--distinct N` no more than
N texts come, again and again: then no length is new after the first round, and what grows still is
what a run keeps of each output.

FOLDER gets `memory.csv` and `memory.png`: resident memory of all the run's processes every five
seconds, and how many outputs were written by then. The last line printed is the growth over the
second half, by least squares.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import linear_regression

import matplotlib as mpl
import psutil

from specbench_cli.tasks.load import load_task

mpl.use("agg")
from matplotlib import pyplot as plt

METHODS = "vanilla,sps,pld,eagle2,suffix,token-recycling,sequoia"
EVERY_S = 5
PROMPTS = 20_000
"""More than a machine answers in an hour."""


def task(file: Path, prompts: int, distinct: int) -> None:
    """A task of so many texts, of which so many are not the same, by a fixed seed."""
    rng = Random(0)
    texts = [turn for question in load_task("mini").questions for turn in question.turns]
    made = [" ".join(rng.sample(texts, rng.randint(1, 4))) for _ in range(min(prompts, distinct))]
    with file.open("w", encoding="utf-8") as lines:
        for at in range(prompts):
            row = {"turns": [made[at % len(made)]], "category": "qa"}
            lines.write(json.dumps(row) + "\n")


def resident(process: psutil.Process) -> float:
    """MB that a process and all below it hold."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total / 1e6


def watched(
    folder: Path, methods: str, seconds: float, distinct: int
) -> list[tuple[float, float, int]]:
    """Seconds, MB and outputs of a run that is ended after so many seconds."""
    task(folder / "soak.jsonl", PROMPTS, distinct)
    run = folder / "run"
    words = ["run", "-m", methods, "--task", str(folder / "soak.jsonl"), "--out", str(run)]
    words += ["--max-new-tokens", "64", "--threads", "1", "--allow-noise"]
    seen: list[tuple[float, float, int]] = []
    outputs, read = 0, 0
    with (folder / "soak.log").open("wb") as log:
        command = [sys.executable, "-m", "specbench_cli", *words]
        started = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        began, process = time.monotonic(), psutil.Process(started.pid)
        while started.poll() is None and time.monotonic() - began < seconds:
            time.sleep(EVERY_S)
            records = run / "records.jsonl"
            if records.exists():
                with records.open("rb") as file:
                    file.seek(read)
                    new = file.read()
                outputs, read = outputs + new.count(b"\n"), read + len(new)
            with suppress(psutil.NoSuchProcess):
                seen.append((time.monotonic() - began, resident(process), outputs))
        started.send_signal(signal.SIGTERM)  # which nohup leaves as it is
        started.wait()
    return seen


def growth(seen: list[tuple[float, float, int]]) -> dict[str, float]:
    """What a run held, and by how much that grew over its second half."""
    late = seen[len(seen) // 2 :]
    slope = linear_regression([row[0] for row in late], [row[1] for row in late]).slope
    return {
        "seconds": round(seen[-1][0]),
        "outputs": seen[-1][2],
        "mb_at_half": round(late[0][1], 1),
        "mb_at_end": round(late[-1][1], 1),
        "mb_an_hour": round(slope * 3600, 1),
        "kb_an_output": round(1e3 * (late[-1][1] - late[0][1]) / (late[-1][2] - late[0][2]), 2),
    }


def main() -> None:
    """Run, write, draw, say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("-m", "--methods", default=METHODS)
    parser.add_argument("--distinct", type=int, default=PROMPTS, help="texts, again and again")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    seen = watched(given.folder, given.methods, given.seconds, given.distinct)
    with (given.folder / "memory.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["seconds", "mb", "outputs"])
        rows.writerows((round(at), round(mb, 1), n) for at, mb, n in seen)
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot([at / 60 for at, _, _ in seen], [mb for _, mb, _ in seen], linewidth=1)
    axes.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, None))
    figure.savefig(given.folder / "memory.png", dpi=100, bbox_inches="tight")
    print(json.dumps(growth(seen)))  # noqa: T201


if __name__ == "__main__":
    main()
