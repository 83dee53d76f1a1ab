"""Runs with a bad plug-in beside our methods: does any other row come to something else?

    python benchmarks/soundness/bad_plugins.py [NAME ...]

Each of `PLUGINS` is run beside `sps` and `pld`. What must hold: the other rows' outputs, steps and
forwards are those of a run without it, or the plug-in is refused before anything is measured, or
the run is given up because the plug-in wrote to its files; the
exit code is not 0 where it does harm to its own row, the method is named, and no process is left.

torch is imported once, on one thread; a run is a fork that calls the command line, and a plug-in
process (a fresh interpreter otherwise) is a fork of that. Exit code 1 if anything differs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SPECBENCH_LINEAR"] = "packed"  # Numba's threads end a fork of what has started them

import psutil
import torch
import yaml

from specbench_cli import app
from specbench_cli.measure import quiet, worker_process
from specbench_cli.report import outputs
from specbench_cli.store.run_dir import RunDir

RUN = "run --allow-noise --category qa --max-new-tokens 6 --limit 4 --timeout-per-prompt 4".split()

SOURCE = """
import atexit, builtins, ctypes, gc, os, random, signal, subprocess, sys, threading, time, warnings
from pathlib import Path
import numpy, torch
from specbench_cli.api import Method, MethodParams

{top}

class Bad(Method):
    \"\"\"A bad one.\"\"\"
    name = "bad"
    {body}

    def start(self, session):
        {start}

    def propose(self, session, limit):
        {propose}
        return session.chain([session.tokens()[-1]] * min(2, limit))

    def observe(self, session, outcome):
        {observe}
"""

HARM = "raise RuntimeError('and it fails')"
"""Appended where what is done would leave the plug-in's own row right: a fault to be named."""

PLUGINS: dict[str, tuple[str, str, str]] = {
    # name: kind, where, what
    name: (each["kind"], each["where"], each["what"] + f"; {HARM}" * each.get("fails", False))
    for name, each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def source(where: str, what: str) -> str:
    """A plug-in that does something somewhere."""
    parts = dict.fromkeys(("start", "propose", "observe"), "pass")
    if where == "top":  # what an import gets away with ends in a fault
        parts["start"] = HARM
    return SOURCE.format(**{"top": "", "body": "", **parts, where: what})


def forked(words: list[str], said: Path) -> int:
    """The exit code of the command line in a process of its own."""
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        app.main(words)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Fork:
    """A fork that calls the function of a worker process's command; see `worker_process.start`."""

    def __init__(
        self, command: Sequence[str], descriptors: Sequence[int], *, leads_session: bool
    ) -> None:
        *_, function, parent, connection = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        if leads_session:
            os.setsid()
        sys.argv = ["-c", parent, connection]
        module, _, name = function.partition(":")
        getattr(import_module(module), name)()

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        if self.returncode is None:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if child else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("plug-in", timeout or 0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def others(folder: Path) -> dict[Any, Any]:
    """Ids and counters of the rows beside it."""
    return {
        record.key: (
            record.output_ids,
            record.origin,
            record.steps,
            record.target_forwards,
            record.draft_forwards,
            record.error,
        )
        for record in RunDir.open(folder).records()
        if record.label != "bad"
    }


def left() -> list[int]:
    """Processes that our trials left."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def main() -> int:
    """See above."""
    wanted = sys.argv[1:] or list(PLUGINS)
    home = Path(tempfile.mkdtemp(prefix="specbench-harm-"))
    told: Counter[str] = Counter()
    with (
        patch.object(quiet, "WINDOW_S", 0.05),
        patch.object(outputs, "write_figures", lambda *_, **__: []),
        patch.object(worker_process, "start", Fork),
    ):
        torch.set_num_threads(1)
        assert app._run([*RUN, "-m", "sps,pld", "--out", str(home / "whole")]) == 0
        whole = others(home / "whole")
        for name in wanted:
            kind, where, what = PLUGINS[name]
            file, said = home / f"bad_{name.replace('-', '_')}.py", home / f"{name}.txt"
            file.write_text(textwrap.dedent(source(where, what)))
            folder, began = home / name, time.monotonic()
            words = [*RUN, "-m", "sps,pld,bad", "--plugin", str(file), "--out", str(folder)]
            code = forked(words, said)
            talk = said.read_text(errors="replace")
            refused = code == 2 and not RunDir.holds_run(folder)
            spoiled = code == 2 and "is no measurement" in talk  # told; the run is given up
            same = refused or spoiled or (RunDir.holds_run(folder) and others(folder) == whole)
            lines = [line for line in talk.splitlines() if len(line) < 1000]
            naming = ("error: ", "bad failed", "bad: ", "bad is ")
            named = [x for x in lines if x.startswith(naming) and "bad" in x]
            good = bool(same and named and code and not left())
            told[f"{kind}: {'held' if good else 'NOT HELD'}"] += 1
            why = next(
                (line for line in talk.splitlines() if "bad" in line and len(line) < 2000), ""
            )
            row = (
                "held" if good else "NOT HELD",
                name,
                kind,
                code,
                "refused" if refused else "given up" if spoiled else "ran",
            )
            print(*row, f"{time.monotonic() - began:.0f} s", why[:160], sep="\t", flush=True)  # noqa: T201
            if good:
                shutil.rmtree(folder, ignore_errors=True)
    for line, times in sorted(told.items()):
        print(f"{line}\t{times}")  # noqa: T201
    held = sum(times for what, times in told.items() if "NOT" not in what)
    print(f"{held} of {len(wanted)} held, of {len({PLUGINS[name][0] for name in wanted})} kinds")  # noqa: T201
    return any("NOT" in what for what in told)


if __name__ == "__main__":
    raise SystemExit(main())
