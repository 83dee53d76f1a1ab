"""The run's side of plug-ins in processes of their own."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from specbench_cli import plugin, registry
from specbench_cli.config import plugin_file
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.engine.workers.lifeline import deaf_to_interrupts
from specbench_cli.errors import (
    EnvironmentFault,
    MethodFault,
    SpecbenchError,
    UsageError,
    WorkerLost,
)
from specbench_cli.measure.isolation import answers

LOADING_S = 600.0
"""The longest that an import, and the loading of models, may take."""
STARTING_S = 120.0
"""Maximum time in seconds to start a process, including the import of torch."""
_LOOK_S = 0.2
"""How often who waits for an answer looks whether the process is still there."""

_rooms: dict[str | None, Room] = {}


class Gone(MethodFault):
    """A plug-in's process ended, or did not answer in time; the next order starts another."""


def check_plugins(config: RunConfig) -> None:
    """Import each plug-in of a configuration in its own process, and plan its methods there.

    Does nothing if the configuration runs plug-ins in the process of the run.

    Raises:
        UsageError: a plug-in cannot be imported, or changes the state of its process.
    """
    if config.isolation != "process":
        return
    for path in config.plugins:
        vet(path)
        registry.load_plugin(path)
    vet_rows(config.methods, config.plugins)


def vet(file: str) -> None:
    """Import a plug-in in a process of its own, and say so where that changes what others need.

    Raises:
        UsageError: it does not import, ends the process, or changes what is not its own.
    """
    if not Path(file).is_file():
        return  # who imports it says so
    room = room_of(file)
    with _named(file, "imported"):
        if not room.alive:
            room.begin()
    _refuse(file, "imported", room.changed)


def vet_rows(rows: Sequence[MethodChoice], files: Sequence[str]) -> None:
    """The same of making the methods of rows, and of asking them what they are."""
    own: dict[str | None, list[MethodChoice]] = {}
    for row in rows:
        if row.name not in registry.ours():
            own.setdefault(file_of(row.name, files), []).append(row)
    for file, listed in own.items():
        names = ", ".join(dict.fromkeys(row.name for row in listed))
        with _named(names, "planned with"):
            changed = room_of(file).ask("vet", listed)
        _refuse(names, "planned with", changed)


def file_of(name: str, files: Sequence[str]) -> str | None:
    """The plug-in that a method is in; None where it is of an installed distribution."""
    return next((file for file in files if name in registry.load_plugin(file)), None)


def room_of(file: str | None) -> Room:
    """The process of a plug-in's file; None: of those that are installed."""
    return _rooms.setdefault(file, Room(file))


def close_rooms() -> None:
    """End all of them."""
    while _rooms:
        _rooms.popitem()[1].end()


atexit.register(close_rooms)
"""Before `multiprocessing.util`, imported above, waits for them: what came last goes first."""


class Room:
    """A process that a plug-in has to itself. Between its orders it is stopped, with all that it
    started, so that nothing of it takes a processor from others."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._process: Any = None
        self.changed: list[str] = []

    @property
    def alive(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._process is not None

    def ask(self, order: str, *arguments: Any, within: float = LOADING_S) -> Any:
        """What an order comes to; see `inside.Inside`.

        Args:
            within: seconds.
        Raises:
            Gone: the process is. MethodFault: it failed. SpecbenchError: what it refused.
        """
        if self._process is None:
            self.begin()
        self._signal("SIGCONT")
        try:
            self._line.send((order, arguments))
            return self._heard(within)
        except (BrokenPipeError, ConnectionResetError):
            self._lost()

    def begin(self) -> None:
        """Start the process, which imports the plug-in."""
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(os.getpid(), theirs, self._file, plugin_file.held()),
            name="specbench plug-in",
        )
        with deaf_to_interrupts(context):
            self._process.start()
        theirs.close()
        self.changed = self._heard(STARTING_S + plugin.IMPORT_S)

    def end(self) -> int | None:
        """End it with all that it started; its exit code."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        code: int | None = process.exitcode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        self._line.close()
        return code

    def _heard(self, within: float) -> Any:
        try:
            return self._answer(within)
        except KeyboardInterrupt:  # nobody will hear the answer
            self.end()
            raise

    def _answer(self, within: float) -> Any:
        end = time.monotonic() + within
        while not self._line.poll(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if self._process.exitcode is not None and not self._line.poll():
                self._lost()
            if time.monotonic() >= end:
                self.end()
                raise Gone(f"no answer after {within:g} s: its process was ended")
        try:
            kind, found = answers.load(self._line.recv_bytes())
        except (EOFError, OSError):
            self._lost()
        except Exception as fault:
            self.end()
            raise Gone(f"its process sent what is no answer: {fault}") from fault
        self._signal("SIGSTOP")
        if kind == "done":
            return found
        if kind == "failed":
            raise MethodFault(str(found))
        name, message, hint = found
        raise _KINDS.get(name, UsageError)(message, hint)

    def _lost(self) -> NoReturn:
        self._process.join(1.0)
        code = self.end()
        if code is not None and code < 0:
            raise Gone(f"its process was killed by {signal.Signals(-code).name}")
        raise Gone(f"it ended its process (exit code {code})")

    def _signal(self, name: str) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, getattr(signal, name))


def _serve(parent: int, line: Connection, file: str | None, held: Mapping[Path, bytes]) -> None:
    """What the process does. What it takes for that is imported there: here it is in nobody's way
    until a run begins."""
    from specbench_cli.measure.isolation.inside import serve

    plugin_file.hold_all(held)
    serve(parent, line, file)


_KINDS = {each.__name__: each for each in (MethodFault, EnvironmentFault, WorkerLost)}


def _refuse(what: str, when: str, changed: Sequence[str]) -> None:
    """Raise UsageError where a plug-in changes what others need."""
    if changed:
        close_rooms()
        raise UsageError(
            f"{what} changes {', '.join(changed)} when it is {when}, for every method of the run",
            "change it in the method, around what needs it, and back",
        )


@contextmanager
def _named(what: str, when: str) -> Iterator[None]:
    try:
        yield
    except MethodFault as fault:
        close_rooms()
        hint = fault.hint or "it must do nothing to the process that it is in"
        raise UsageError(f"{what} cannot be {when}: {fault.message}", hint) from fault
    except SpecbenchError:
        close_rooms()
        raise
