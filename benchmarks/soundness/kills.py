"""Kill runs at random moments, resume them, and compare them with an uninterrupted run.

    python benchmarks/soundness/kills.py --kills 200 --pairs 50

A kill sends SIGKILL to the run's process, to all of its processes, or first to one of its children.
Half of the resumed runs are killed too. Then the run is resumed to its end. Outputs, steps,
forwards and prompts must equal those of an uninterrupted run, no record may be lost or duplicated,
no file may be missing, and no process may remain. A pair resumes a run twice at the same time: one
resumed run continues, the other is rejected.

torch is imported and models are loaded once, with one thread. A trial is a fork that calls the
command line. Processes that a run starts as new interpreters (repeats, drafters) are forks here
too. The exit code is 1 if anything differs.
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
os.environ["SPECBENCH_LINEAR"] = "packed"  # a fork of a process with Numba threads crashes

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
REQUIRED_FILES = ("manifest.json", "prompts.jsonl", "records.jsonl", "records.parquet", "report.md")


def fork(work: Callable[[], Any]) -> int:
    """Call a function in a forked process and return the process id."""
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


def specbench(arguments: Sequence[str], output: Path) -> int:
    """Run the command line in a forked process, with output to a file; return the process id."""

    def work() -> None:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        app.main(arguments)

    return fork(work)


def fork_repeat(arguments: Sequence[str], descriptors: Sequence[int] = ()) -> int:
    """Run a repeat as a fork of the run and return its exit code.

    This replaces `repeat_process.run_command`.
    """
    arguments = [*arguments[arguments.index("run") :]]
    arguments[arguments.index("--parent") + 1] = str(os.getpid())
    parent = os.getpid()
    child = fork(lambda: (exit_with_parent(parent), app.main(arguments)))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise


def load_once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a loader that loads each checkpoint once."""
    loaded: dict[Path, Any] = {}

    def load(checkpoint: Any) -> Any:
        if checkpoint.path not in loaded:
            loaded[checkpoint.path] = make(checkpoint)
        return loaded[checkpoint.path]

    return load


def wait_for_exit_code(child: int) -> int:
    """Wait for a process and return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of a run that must not differ.

    The number of forwards of parallel methods is left out: it depends on timing.
    """
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
        "files": [name for name in REQUIRED_FILES if not (folder / name).exists()],
        "left over": sorted(file.name for file in folder.glob(".*")),
    }


class KillTrials:
    """Trials in a folder of their own.

    Attributes:
        counts: number of trials by outcome.
        failures: descriptions of the differences that were found.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.rng = home, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._expected: dict[str, dict[str, Any]] = {}
        self._durations: dict[str, float] = {}

    def expected_results(self, name: str) -> dict[str, Any]:
        """Return the results of the uninterrupted run of a name.

        The first call runs it in this process, so that forks have all modules loaded, and then in
        a fork to measure its time.
        """
        if name not in self._expected:
            folder, output = self.home / f"{name}-whole", self.home / "whole.txt"
            with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
                code = app._run([*RUNS[name], "--out", str(folder)])
            assert code == 0, output.read_text()
            self._expected[name], start = read_results(folder), time.monotonic()
            wait_for_exit_code(specbench([*RUNS[name], "--out", f"{folder}-2"], output))
            self._durations[name] = time.monotonic() - start
            assert read_results(Path(f"{folder}-2")) == self._expected[name], output.read_text()
        return self._expected[name]

    def run_kill_trial(self, number: int) -> None:
        """Kill a run once or twice, resume it to its end, and compare its results."""
        name = list(RUNS)[number % len(RUNS)]
        expected = self.expected_results(name)
        folder, output = self.home / f"{name}-{number}", self.home / f"{name}-{number}.txt"
        for _ in range(1 + self.rng.randrange(2)):
            child = specbench(self._command(name, folder), output)
            time.sleep(self.rng.random() * self._durations[name])
            self._kill_processes(child)
        code = wait_for_exit_code(child := specbench(self._command(name, folder), output))
        found = (
            read_results(folder)
            if code == 0
            else {"code": code, "output": output.read_text()[-1500:]}
        )
        remaining = [p.pid for p in psutil.process_iter() if _session(p.pid) == child]
        self.counts[
            "kills: equal" if found == expected and not remaining else "kills: DIFFERENT"
        ] += 1
        if found != expected or remaining:
            differing = [key for key in found if found[key] != expected.get(key)]
            self.failures.append(
                f"{name} {number}: {differing} {found if code else ''} {remaining}"
            )
        else:
            shutil.rmtree(folder)

    def run_pair_trial(self, number: int) -> None:
        """Resume a killed run in two processes at the same time; one of them must be rejected."""
        folder, output = self.home / f"pair-{number}", self.home / f"pair-{number}"
        expected, limit = (
            self.expected_results("longer"),
            len(self.expected_results("longer")["records"]) // 2,
        )
        while True:  # repeat until a kill leaves some outputs done, at most half
            child = specbench([*RUNS["longer"], "--out", str(folder)], output.with_suffix(".0"))
            time.sleep(self._durations["longer"] * self.rng.uniform(0.2, 0.7))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if (
                RunDir.holds_run(folder)
                and 0 < sum(1 for _ in RunDir.open(folder).records()) <= limit
            ):
                break
            shutil.rmtree(folder, ignore_errors=True)
        arguments = self._command("longer", folder)
        children = [specbench(arguments, output.with_suffix(f".{at}")) for at in (1, 2)]
        codes = [wait_for_exit_code(child) for child in children]
        texts = [output.with_suffix(f".{at}").read_text() for at in (1, 2)]
        refused = [
            code == 2 and "a run has one writer" in text
            for code, text in zip(codes, texts, strict=True)
        ]
        passed = read_results(folder) == expected and sorted(codes) == [0, 2] and sum(refused) == 1
        self.counts["pairs: one rejected" if passed else "pairs: FAILED"] += 1
        if not passed:
            self.failures.append(f"pair {number}: {codes} {texts}")

    def _command(self, name: str, folder: Path) -> list[str]:
        """Return the command that resumes a run, or starts it if there is none."""
        if RunDir.holds_run(folder):
            return ["run", "--resume", str(folder)]
        return [*RUNS[name], "--out", str(folder)]

    def _kill_processes(self, child: int) -> None:
        victim = self.rng.choice(("the run", "all processes", "a child"))
        with suppress(psutil.Error, ProcessLookupError):
            children = psutil.Process(child).children(recursive=True)
            if victim == "a child" and children:
                self.rng.choice(children).kill()
                self.counts["killed: a child"] += 1
                time.sleep(self.rng.random() * 0.1)
            elif victim == "all processes":
                os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        self.counts[
            "killed: running" if wait_for_exit_code(child) < 0 else "killed: already ended"
        ] += 1


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def main() -> int:
    """Run the trials, print the counts, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="specbench-kills-"))
    with (
        patch.object(repeat_process, "run_command", fork_repeat),
        patch.object(quiet, "WINDOW_S", 0.05),
        patch.multiple(warm_up, WARM_UP_ROUNDS=1, WARM_UP_TOKENS=2),
        patch.multiple(
            bench,
            load_decoder=cache(bench.load_decoder),
            read_checkpoint_facts=cache(bench.read_checkpoint_facts),
            get_module=cache(bench.get_module),
            load_tokenizer=load_once(bench.load_tokenizer),
        ),
        patch.object(outputs, "write_figures", lambda *_, **__: []),
        patch.object(
            process.multiprocessing, "get_context", lambda *_: multiprocessing.context.ForkContext()
        ),
    ):
        trials = KillTrials(home, options.seed)
        for number in range(options.kills):
            trials.run_kill_trial(number)
            print(f"{number + 1} kills {dict(trials.counts)}", file=sys.stderr, flush=True)  # noqa: T201
        for number in range(options.pairs):
            trials.run_pair_trial(number)
            print(f"{number + 1} pairs {dict(trials.counts)}", file=sys.stderr, flush=True)  # noqa: T201
    for outcome, times in sorted(trials.counts.items()):
        print(f"{outcome}\t{times}")  # noqa: T201
    for line in trials.failures:
        print(line)  # noqa: T201
    if not trials.failures:
        shutil.rmtree(home)
    return bool(trials.failures)


if __name__ == "__main__":
    raise SystemExit(main())
