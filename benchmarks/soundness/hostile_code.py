"""Run hostile answers as `--run-code` does, and report what each of them reaches.

    python benchmarks/soundness/hostile_code.py [NAME ...] [--uncontained NAME ...]

The programs are in hostile_code.yaml. A program of `reaching` passes if its attempt succeeds. A
program of `forging` tries to pass tests that it cannot satisfy. So all must fail. Independent traps
report what was reached: files that must not change, sockets that must receive nothing, processes
that must not remain. The script prints a Markdown table. The exit code is 1 if a program passed or
reached anything.

`--uncontained` runs programs as `specbench run --run-code --uncontained` does. Many of them succeed
there and have an effect, so only programs of `HARMLESS` are allowed.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import yaml

from specbench_cli.scoring import code, sandbox

HEAD = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
C = ctypes.CDLL(None, use_errno=True)
TRAP, PORT = {trap!r}, {port}
"""

CALLS = {
    # numbers of system calls that the programs make: x86-64, ARM64
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "io_setup": (206, 0),
    "keyctl": (250, 219),
    "membarrier": (324, 283),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "request_key": (249, 218),
    "socket": (41, 198),
    "timer_create": (222, 107),
    "userfaultfd": (323, 282),
}
_CALLS = {name: each[os.uname().machine == "aarch64"] for name, each in CALLS.items()}


_PROGRAMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
REACHING, FORGING = (
    {name: (each["tries"], each["body"]) for name, each in _PROGRAMS[kind].items()}
    for kind in ("reaching", "forging")
)

NEEDLE = '\nNEEDLE = "NEEDLE-OF-THE-TESTS"\n'

TESTS = f"""
{NEEDLE}
cases = iter([(2, 3), (40, 2), (-1, 1)])


def check(add):
    for a, b in cases:
        assert add(a, b) == a + b
    for total in map(add, [1, 2], [2, 1]):
        assert total == 3
    try:
        add(None, 1)
    except (TypeError, ValueError):
        pass
    else:
        assert False


if __name__ == "__main__":
    check(add)
"""

HARMLESS = (
    "passwd home run-folder write-outside symlink tcp udp unix-socket abstract-socket others"
    " specbench exit-0 end-0 equal-to-all any assertions printed"
).split()


class Traps:
    """Files, sockets and processes outside the sandbox, to detect what an answer reaches.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "records.jsonl").write_text("secret")
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._listeners[0].getsockname()[1]
        datagrams = socket.socket(type=socket.SOCK_DGRAM)
        datagrams.bind(("127.0.0.1", self.port))
        self._datagrams = datagrams
        for name in (str(folder / "socket"), f"\0{folder}"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)
            listener.listen()
            self._listeners.append(listener)
        for each in (*self._listeners, datagrams):
            each.setblocking(False)

    def poll(self) -> list[str]:
        """Return what was reached since the last call."""
        found = []
        if sorted(path.name for path in self._folder.iterdir()) != ["records.jsonl", "socket"]:
            found.append("a file outside")
            (self._folder / "written").unlink(missing_ok=True)
        for listener in self._listeners:
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("a listener")
        with suppress(BlockingIOError):
            self._datagrams.recv(9)
            found.append("a listener")
        if any(map(_is_left_over, psutil.process_iter())):
            found.append("a process is left")
        return found

    def close(self) -> None:
        """Close all sockets."""
        for each in (*self._listeners, self._datagrams):
            each.close()


def _is_left_over(process: psutil.Process) -> bool:
    """Return True if a process is a sandbox that this process or an ended one started."""
    if sandbox.__file__ not in _command_line(process):
        return False
    try:
        above = {each.pid for each in process.parents()}
    except psutil.NoSuchProcess:
        return False
    return os.getpid() in above or above <= {1}  # else another test process owns it


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def program(name: str, traps: Path, port: int) -> tuple[str, str]:
    """Return a hostile answer, and the tests that it must not pass."""
    head = HEAD.format(trap=str(traps), port=port)
    if name in FORGING:
        return f"{head}\n{FORGING[name][1]}\n", TESTS
    body = REACHING[name][1]
    body = body.replace("{path!r}", repr(sys.path))
    for call, number in _CALLS.items():
        body = body.replace(f"{{{call}}}", str(number))
    attempt = f"{head}\ndef attempt():\n{textwrap.indent(body, '    ')}\n"
    return attempt, f"{NEEDLE}\nassert attempt()\n"


def run_programs(
    names: list[str], *, uncontained: bool = False
) -> Iterator[tuple[str, list[str], bool]]:
    """Run programs, and yield each one's name, what it reached, and whether it passed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"SPECBENCH_SECRET": "secret"}),
    ):
        traps = Traps(Path(folder))
        try:
            for name in names:
                answer, tests = program(name, Path(folder), traps.port)
                passed = code.passes_tests(answer, "", tests, uncontained=uncontained)
                reached = [REACHING[name][0]] if name in REACHING and passed else []
                yield name, [*reached, *traps.poll()], passed
        finally:
            traps.close()


def main() -> int:
    """Run the programs, print the table, and return the exit code."""
    arguments = sys.argv[1:]
    uncontained = "--uncontained" in arguments
    wanted = [word for word in arguments if word != "--uncontained"]
    wanted = wanted or (HARMLESS if uncontained else [*REACHING, *FORGING])
    if uncontained and (harmful := {*wanted} - {*HARMLESS}):
        print(f"not without containment: {', '.join(sorted(harmful))}")  # noqa: T201
        return 2
    n_safe = 0
    print("| program | tries to | reached | verdict |\n| --- | --- | --- | --- |")  # noqa: T201
    start = time.monotonic()
    for name, reached, passed in run_programs(wanted, uncontained=uncontained):
        what = {**REACHING, **FORGING}[name][0]
        verdict = "PASSED" if passed else "failed"
        row = f"| `{name}` | {what} | {', '.join(reached) or 'nothing'} | {verdict} |"
        print(row, flush=True)  # noqa: T201
        n_safe += not reached and not passed
    print(f"\n{n_safe} of {len(wanted)} reached nothing and failed")  # noqa: T201
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)  # noqa: T201
    return n_safe < len(wanted)


if __name__ == "__main__":
    raise SystemExit(main())
