"""Runs tests against mutants: forks of one warm process, each in a copy of the tree of its own."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import child
from mutants import Mutant

Work = tuple[Mutant, Sequence[Sequence[str]]]
"""A mutant, and the tests that may kill it in stages."""


STARTING = 60
"""Seconds of silence more, until the first test starts: imports on a busy machine."""


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        status: "killed", "timeout" (no test ended for too long), "crash", "survived", "uncovered"
            (no test runs it) or "error" (pytest could not run the tests: look at the log).
        test: the one that failed, or the last one that started.
    """

    mutant: Mutant = field(repr=False)
    status: str
    test: str
    seconds: float


@dataclass
class _Job:
    mutant: Mutant
    pid: int
    pipe: int
    began: float
    heard: float
    said: bytes = b""
    lines: list[str] = field(default_factory=list)


class Runner:
    """Trees `0`, `1`... under a folder, each with at most one mutant at work.

    Args:
        root: the tree to copy.
        folder: where the copies go; emptied first.
        silence: seconds without word from a test that count as a hang.
    """

    def __init__(self, root: Path, folder: Path, jobs: int, silence: float) -> None:
        self._root, self._silence = root, silence
        self._trees = [folder / str(at) for at in range(jobs)]
        shutil.rmtree(folder, ignore_errors=True)
        for tree in self._trees:
            ignored = shutil.ignore_patterns(".git", "__pycache__", ".hypothesis", "runs", ".venv")
            shutil.copytree(root, tree, ignore=ignored)

    def run(self, work: Iterable[Work]) -> Iterator[Result]:
        """Results in the order in which they come."""
        todo = iter(work)
        jobs: dict[Path, _Job] = {}
        try:
            while True:
                for tree in self._trees:
                    if tree not in jobs and (next_one := next(todo, None)) is not None:
                        jobs[tree] = self._start(tree, *next_one)
                if not jobs:
                    return
                select.select([job.pipe for job in jobs.values()], [], [], 1.0)
                for tree, job in list(jobs.items()):
                    result = self._listen(job)
                    if result is not None:
                        del jobs[tree]
                        self._clean(tree, job)
                        yield result
        finally:
            for tree, job in jobs.items():
                self._clean(tree, job)

    def _start(self, tree: Path, mutant: Mutant, stages: Sequence[Sequence[str]]) -> _Job:
        (tree / mutant.file).write_text(mutant.text, encoding="utf-8")
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Of threads: those that libraries keep are idle here, and the child needs none.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.set_inheritable(writer, False)
            child.main(tree, stages, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        now = time.monotonic()
        return _Job(mutant, pid, reader, now, now)

    def _listen(self, job: _Job) -> Result | None:
        """The result, once there is one."""
        now = time.monotonic()
        ended = False
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(job.pipe, 65536)
                if not data:
                    ended = True
                    break
                job.said += data
                job.heard = now
        *whole, job.said = job.said.split(b"\n")
        job.lines += [line.decode(errors="replace") for line in whole]
        failed = next((line[2:] for line in job.lines if line.startswith("! ")), None)
        last = next((line[2:] for line in job.lines[::-1] if line.startswith("> ")), "")
        code = next((line[2:] for line in job.lines if line.startswith("= ")), None)
        if failed is not None:
            status, last = "killed", failed
        elif code is not None:
            status = "survived" if code == "0" else "error"
        elif ended:
            status = "crash"
        elif now - job.heard > self._silence + (0 if job.lines else STARTING):
            status = "timeout"
        else:
            return None
        return Result(job.mutant, status, last, now - job.began)

    def _clean(self, tree: Path, job: _Job) -> None:
        """End the mutant's processes and take the mutant out of its tree."""
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(job.pid, signal.SIGKILL)
        os.waitpid(job.pid, 0)
        os.close(job.pipe)
        file = Path(job.mutant.file)
        shutil.copy2(self._root / file, tree / file)
        for cached in (tree / file.parent / "__pycache__").glob(f"{file.stem}.*"):
            cached.unlink()
        shutil.rmtree(tree.parent / f"{tree.name}.tmp", ignore_errors=True)
