"""Kills runs at random moments and resumes them: does that give what an uninterrupted run gives?

    python benchmarks/soundness/kills.py --kills 200 --pairs 50

A kill is SIGKILL: to the run's process, to all of its processes at once, or first to one that it
started. Half of the resumptions are killed too. Then the run is resumed to its end and held against
one that nobody touched: outputs, steps, forwards, prompts, no record lost or doubled, all files
there, no process left. A pair is two resumptions at once: one goes on, one is refused.

torch is imported and models are loaded once, on one thread; a trial is a fork that calls the
command line. What a run starts as a fresh interpreter (passes, drafters) is a fork here too. Exit
code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SPECBENCH_LINEAR"] = "packed"  # Numba's threads end a fork of what has started them

import psutil
import torch

from specbench_cli import app
from specbench_cli.engine.workers import process
from specbench_cli.engine.workers.process_lifetime import exit_with_parent
from specbench_cli.measure import bench, quiet, repeat_process, warm_up
from specbench_cli.report import outputs
from specbench_cli.store.run_dir import RunDir

SMALL = "run --allow-noise --category qa --max-new-tokens 6 --limit".split()
RUNS = {
    "serial": [*SMALL, "2", "-m", "sps,pld"],
    "learning": [*SMALL, "2", "-m", "suffix,token-recycling"],
    "parallel": [*SMALL, "2", "-m", "pearl,ssd"],
    "passes": [*SMALL, "2", "-m", "sps", "--repeats", "2"],
    "tuned": [*SMALL, "4", "-m", "pld", "--tune", "2", "--tune-by", "forwards"],
    "turns": [*SMALL, "1", "-m", "sps", "--category", "multi_turn"],
    "longer": [*SMALL, "8", "-m", "sps"],
    "drawn": [*SMALL, "2", "-m", "sps,rsd-s", "--temperature", "0.8"],
}
MUST_BE = ("manifest.json", "prompts.jsonl", "records.jsonl", "records.parquet", "report.md")


def forked(work: Callable[[], Any]) -> int:
    """A process that leads a group of its own and does something; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def specbench(words: Sequence[str], said: Path) -> int:
    """The command line as a process; what it says goes to a file."""

    def work() -> None:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        app.main(words)

    return forked(work)


def pass_apart(words: Sequence[str], descriptors: Sequence[int] = ()) -> int:
    """In place of `repeat_process.finished`: the pass of a run as a fork of it."""
    words = [*words[words.index("run") :]]
    words[words.index("--parent") + 1] = str(os.getpid())
    parent = os.getpid()
    child = forked(lambda: (exit_with_parent(parent), app.main(words)))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise


def kept(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What is made of a checkpoint, once."""
    made: dict[Path, Any] = {}

    def once(checkpoint: Any) -> Any:
        if checkpoint.path not in made:
            made[checkpoint.path] = make(checkpoint)
        return made[checkpoint.path]

    return once


def ended(child: int) -> int:
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def of(folder: Path) -> dict[str, Any]:
    """What must not differ: how many forwards workers ran is a matter of time."""
    run = RunDir.open(folder)
    found = {
        record.key: (
            record.output_ids,
            record.origin,
            record.steps,
            record.error,
            record.method in ("pearl", "ssd") or (record.target_forwards, record.draft_forwards),
        )
        for record in run.records()
    }
    rows = [(row["label"], row["params"], row["source"]) for row in run.manifest["rows"]]
    return {
        "records": found,
        "prompts": sorted(map(str, run.prompts())),
        "rows": rows,
        "status": run.manifest["status"],
        "files": [name for name in MUST_BE if not (folder / name).exists()],
        "left over": sorted(file.name for file in folder.glob(".*")),
    }


class Attack:
    """Trials in a folder of their own.

    Attributes:
        told: what happened how often. wrong: what differed.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.chance = home, random.Random(seed)
        self.told: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._whole: dict[str, dict[str, Any]] = {}
        self._took: dict[str, float] = {}

    def whole(self, name: str) -> dict[str, Any]:
        """The run that nobody touches: in this process, so that forks have all modules; once more
        as a fork, for the time that it takes."""
        if name not in self._whole:
            folder, said = self.home / f"{name}-whole", self.home / "whole.txt"
            with said.open("w") as file, redirect_stdout(file), redirect_stderr(file):
                code = app._run([*RUNS[name], "--out", str(folder)])
            assert code == 0, said.read_text()
            self._whole[name], began = of(folder), time.monotonic()
            ended(specbench([*RUNS[name], "--out", f"{folder}-2"], said))
            self._took[name] = time.monotonic() - began
            assert of(Path(f"{folder}-2")) == self._whole[name], said.read_text()
        return self._whole[name]

    def kill(self, number: int) -> None:
        """One trial: a run, killed once or twice, and resumed."""
        name = list(RUNS)[number % len(RUNS)]
        whole = self.whole(name)
        folder, said = self.home / f"{name}-{number}", self.home / f"{name}-{number}.txt"
        for _ in range(1 + self.chance.randrange(2)):
            child = specbench(self._words(name, folder), said)
            time.sleep(self.chance.random() * self._took[name])
            self._strike(child)
        code = ended(child := specbench(self._words(name, folder), said))
        found = of(folder) if code == 0 else {"code": code, "said": said.read_text()[-1500:]}
        left = [p.pid for p in psutil.process_iter() if _session(p.pid) == child]
        self.told["kills: equal" if found == whole and not left else "kills: DIFFERENT"] += 1
        if found != whole or left:
            differing = [key for key in found if found[key] != whole.get(key)]
            self.wrong.append(f"{name} {number}: {differing} {found if code else ''} {left}")
        else:
            shutil.rmtree(folder)

    def pair(self, number: int) -> None:
        """One trial: two resumptions at once of a run that was killed."""
        folder, said = self.home / f"pair-{number}", self.home / f"pair-{number}"
        whole, most = self.whole("longer"), len(self.whole("longer")["records"]) // 2
        while True:  # killed with work done and most of it left
            child = specbench([*RUNS["longer"], "--out", str(folder)], said.with_suffix(".0"))
            time.sleep(self._took["longer"] * self.chance.uniform(0.2, 0.7))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if (
                RunDir.holds_run(folder)
                and 0 < sum(1 for _ in RunDir.open(folder).records()) <= most
            ):
                break
            shutil.rmtree(folder, ignore_errors=True)
        words = self._words("longer", folder)
        pair = [specbench(words, said.with_suffix(f".{at}")) for at in (1, 2)]
        codes = [ended(child) for child in pair]
        talk = [said.with_suffix(f".{at}").read_text() for at in (1, 2)]
        refused = [
            code == 2 and "a run has one writer" in text
            for code, text in zip(codes, talk, strict=True)
        ]
        right = of(folder) == whole and sorted(codes) == [0, 2] and sum(refused) == 1
        self.told["pairs: one refused" if right else "pairs: OTHERWISE"] += 1
        if not right:
            self.wrong.append(f"pair {number}: {codes} {talk}")

    def _words(self, name: str, folder: Path) -> list[str]:
        """What a person types: to go on where there is a run, else to begin it."""
        if RunDir.holds_run(folder):
            return ["run", "--resume", str(folder)]
        return [*RUNS[name], "--out", str(folder)]

    def _strike(self, child: int) -> None:
        blow = self.chance.choice(("the run", "all at once", "a child of it"))
        with suppress(psutil.Error, ProcessLookupError):
            children = psutil.Process(child).children(recursive=True)
            if blow == "a child of it" and children:
                self.chance.choice(children).kill()
                self.told["struck: a child of it"] += 1
                time.sleep(self.chance.random() * 0.1)
            elif blow == "all at once":
                os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        self.told["struck: running" if ended(child) < 0 else "struck: ended already"] += 1


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="specbench-kills-"))
    with (
        patch.object(repeat_process, "finished", pass_apart),
        patch.object(quiet, "WINDOW_S", 0.05),
        patch.multiple(warm_up, WARM_UP_ROUNDS=1, WARM_UP_TOKENS=2),
        patch.multiple(
            bench,
            load_decoder=cache(bench.load_decoder),
            config_facts=cache(bench.config_facts),
            module_of=cache(bench.module_of),
            tokenizer_of=kept(bench.tokenizer_of),
        ),
        patch.object(outputs, "write_figures", lambda *_, **__: []),
        patch.object(
            process.multiprocessing, "get_context", lambda *_: multiprocessing.context.ForkContext()
        ),
    ):
        attack = Attack(home, asked.seed)
        for number in range(asked.kills):
            attack.kill(number)
            print(f"{number + 1} kills {dict(attack.told)}", file=sys.stderr, flush=True)  # noqa: T201
        for number in range(asked.pairs):
            attack.pair(number)
            print(f"{number + 1} pairs {dict(attack.told)}", file=sys.stderr, flush=True)  # noqa: T201
    for what, times in sorted(attack.told.items()):
        print(f"{what}\t{times}")  # noqa: T201
    for line in attack.wrong:
        print(line)  # noqa: T201
    if not attack.wrong:
        shutil.rmtree(home)
    return bool(attack.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
