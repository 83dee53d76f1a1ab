"""Run bad plug-ins next to built-in methods, and check that the other methods are unaffected.

    python benchmarks/soundness/bad_plugins.py [NAME ...]

Each plug-in of `PLUGINS` runs together with `sps` and `pld`. It passes if the outputs, steps and
forwards of the other methods equal those of a run without it, or if the plug-in is rejected before
the first measurement, or if the run stops because the plug-in wrote to its files. The exit code
must not be 0, a message must name the method, and no process may remain.

torch is imported once, with one thread. A run is a fork that calls the command line, and a plug-in
process (otherwise a new interpreter) is a fork of it. The exit code is 1 if a plug-in fails.
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
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SPECBENCH_LINEAR"] = "packed"  # a fork of a process with Numba threads crashes

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
from types import SimpleNamespace
import numpy, torch
from specbench_cli.api import Method, MethodParams

{top}

class Bad(Method):
    \"\"\"A bad method.\"\"\"
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

FAIL = "raise RuntimeError('and it fails')"
"""Statement for plug-ins whose own results would be right otherwise, so that they always fail."""

PLUGINS: dict[str, tuple[str, str, str]] = {
    # name: kind, where, what
    name: (each["kind"], each["where"], each["what"] + f"; {FAIL}" * each.get("fails", False))
    for name, each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def plugin_source(where: str, what: str) -> str:
    """Return the source of a plug-in that executes statements at a place of `SOURCE`."""
    parts = dict.fromkeys(("start", "propose", "observe"), "pass")
    if where == "top":  # the import succeeds, so the first prompt must fail
        parts["start"] = FAIL
    return SOURCE.format(**{"top": "", "body": "", **parts, where: what})


def run_forked(arguments: list[str], output_file: Path) -> int:
    """Run the command line in a forked process and return its exit code."""
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        app.main(arguments)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class ForkedProcess:
    """A fork that calls the function of a worker process, in place of a `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, start_new_session: bool, **_: Any) -> None:
        *_, function, parent, connection = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        if start_new_session:
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


def other_outputs(folder: Path) -> dict[Any, Any]:
    """Return ids and counters of the outputs of all other methods."""
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


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})
"""The module `subprocess` as `worker_process` sees it here."""


def remaining_processes() -> list[int]:
    """Return the ids of child processes that are still alive."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def main() -> int:
    """Run the plug-ins, print a line for each, and return the exit code."""
    wanted = sys.argv[1:] or list(PLUGINS)
    home = Path(tempfile.mkdtemp(prefix="specbench-harm-"))
    counts: Counter[str] = Counter()
    with (
        patch.object(quiet, "WINDOW_S", 0.05),
        patch.object(outputs, "write_figures", lambda *_, **__: []),
        patch.object(worker_process, "subprocess", FORKING),
    ):
        torch.set_num_threads(1)
        assert app._run([*RUN, "-m", "sps,pld", "--out", str(home / "whole")]) == 0
        expected = other_outputs(home / "whole")
        for name in wanted:
            kind, where, what = PLUGINS[name]
            file, output_file = home / f"bad_{name.replace('-', '_')}.py", home / f"{name}.txt"
            file.write_text(textwrap.dedent(plugin_source(where, what)))
            folder, start = home / name, time.monotonic()
            arguments = [*RUN, "-m", "sps,pld,bad", "--plugin", str(file), "--out", str(folder)]
            code = run_forked(arguments, output_file)
            output = output_file.read_text(errors="replace")
            rejected = code == 2 and not RunDir.holds_run(folder)
            interrupted = code == 2 and "its results are not valid" in output
            same = (
                rejected
                or interrupted
                or (RunDir.holds_run(folder) and other_outputs(folder) == expected)
            )
            lines = [line for line in output.splitlines() if len(line) < 1000]
            naming = ("error: ", "bad failed", "bad: ", "bad is ")
            named = [x for x in lines if x.startswith(naming) and "bad" in x]
            passed = bool(same and named and code and not remaining_processes())
            counts[f"{kind}: {'passed' if passed else 'FAILED'}"] += 1
            why = next(
                (line for line in output.splitlines() if "bad" in line and len(line) < 2000), ""
            )
            row = (
                "passed" if passed else "FAILED",
                name,
                kind,
                code,
                "rejected" if rejected else "stopped" if interrupted else "ran",
            )
            print(*row, f"{time.monotonic() - start:.0f} s", why[:160], sep="\t", flush=True)  # noqa: T201
            if passed:
                shutil.rmtree(folder, ignore_errors=True)
    for line, times in sorted(counts.items()):
        print(f"{line}\t{times}")  # noqa: T201
    n_passed = sum(times for what, times in counts.items() if "FAILED" not in what)
    kinds = {PLUGINS[name][0] for name in wanted}
    print(f"{n_passed} of {len(wanted)} passed, of {len(kinds)} kinds")  # noqa: T201
    return any("FAILED" in what for what in counts)


if __name__ == "__main__":
    raise SystemExit(main())
