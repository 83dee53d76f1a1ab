"""Measurement of the memory of a long run.

    python tests/scale/soak.py FOLDER --seconds 3600

The embedded pair answers prompts of many lengths, made of the questions of `mini`. The methods
draft without a model, with a draft model, with a head or from a memory. `--distinct N` repeats N
prompts: after the first round no length is new, so only what a run keeps per output can grow.

The script writes `memory.csv` and `memory.png` to FOLDER: the resident memory of all processes of
the run, every five seconds, and the number of outputs so far. It prints the growth over the second
half, fitted by least squares.
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
"""Number of prompts, more than a machine answers in an hour."""


def write_task(file: Path, prompts: int, distinct: int) -> None:
    """Write a task with `prompts` prompts, of which `distinct` are different, by a fixed seed."""
    rng = Random(0)
    texts = [turn for question in load_task("mini").questions for turn in question.turns]
    prompt_texts = [
        " ".join(rng.sample(texts, rng.randint(1, 4))) for _ in range(min(prompts, distinct))
    ]
    with file.open("w", encoding="utf-8") as lines:
        for at in range(prompts):
            row = {"turns": [prompt_texts[at % len(prompt_texts)]], "category": "qa"}
            lines.write(json.dumps(row) + "\n")


def measure_resident_memory(process: psutil.Process) -> float:
    """Return the resident memory of a process and its descendants, in MB."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total / 1e6


def measure_run(
    folder: Path, methods: str, seconds: float, distinct: int
) -> list[tuple[float, float, int]]:
    """Measure a run that is ended after `seconds`, as rows of seconds, MB and outputs."""
    write_task(folder / "soak.jsonl", PROMPTS, distinct)
    run = folder / "run"
    arguments = ["run", "-m", methods, "--task", str(folder / "soak.jsonl"), "--out", str(run)]
    arguments += ["--max-new-tokens", "64", "--threads", "1", "--allow-noise"]
    samples: list[tuple[float, float, int]] = []
    outputs, read = 0, 0
    with (folder / "soak.log").open("wb") as log:
        command = [sys.executable, "-m", "specbench_cli", *arguments]
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
                samples.append(
                    (time.monotonic() - began, measure_resident_memory(process), outputs)
                )
        started.send_signal(signal.SIGTERM)  # nohup does not block SIGTERM
        started.wait()
    return samples


def fit_growth(samples: list[tuple[float, float, int]]) -> dict[str, float]:
    """Return the memory of a run and its growth over the second half."""
    late = samples[len(samples) // 2 :]
    slope = linear_regression([row[0] for row in late], [row[1] for row in late]).slope
    return {
        "seconds": round(samples[-1][0]),
        "outputs": samples[-1][2],
        "mb_at_half": round(late[0][1], 1),
        "mb_at_end": round(late[-1][1], 1),
        "mb_an_hour": round(slope * 3600, 1),
        "kb_an_output": round(1e3 * (late[-1][1] - late[0][1]) / (late[-1][2] - late[0][2]), 2),
    }


def main() -> None:
    """Measure a run, write its table and figure, and print the growth."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("-m", "--methods", default=METHODS)
    parser.add_argument("--distinct", type=int, default=PROMPTS, help="number of different prompts")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    samples = measure_run(options.folder, options.methods, options.seconds, options.distinct)
    with (options.folder / "memory.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["seconds", "mb", "outputs"])
        rows.writerows((round(at), round(mb, 1), n) for at, mb, n in samples)
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot([at / 60 for at, _, _ in samples], [mb for _, mb, _ in samples], linewidth=1)
    axes.set(xlabel="minutes", ylabel="resident memory, MB", ylim=(0, None))
    figure.savefig(options.folder / "memory.png", dpi=100, bbox_inches="tight")
    print(json.dumps(fit_growth(samples)))  # noqa: T201


if __name__ == "__main__":
    main()
