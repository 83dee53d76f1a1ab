"""Plug-in processes: one for each plug-in file. It imports the file and runs its methods."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from specbench_cli import plugin, registry
from specbench_cli.config import plugin_file
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.errors import (
    EnvironmentFault,
    MethodFault,
    SpecbenchError,
    UsageError,
    WorkerLost,
)
from specbench_cli.interpreter import python_command
from specbench_cli.measure.isolation import replies
from specbench_cli.measure.worker_process import ProcessEnded, WorkerProcess

LOAD_TIMEOUT_S = 600.0
"""Maximum time in seconds of an order that imports code or loads models."""
START_TIMEOUT_S = 120.0
"""Maximum time in seconds to start a process, including the import of torch."""

_processes: dict[str | None, PluginProcess] = {}


class PluginProcessLost(MethodFault):
    """A plug-in process ended, or did not answer in time. The next order starts a new one."""


def check_plugins(config: RunConfig) -> None:
    """Import each plug-in of a configuration in its own process, and plan its methods there.

    Does nothing if the configuration runs plug-ins in the process of the run.

    Raises:
        UsageError: a plug-in cannot be imported, or changes the state of its process.
    """
    if config.isolation != "process":
        return
    for path in config.plugins:
        check_plugin_import(path)
        registry.load_plugin(path)
    check_method_choices(config.methods, config.plugins)


def check_plugin_import(file: str) -> None:
    """Import a plug-in in its own process, and check that this changes no shared state.

    Raises:
        UsageError: the import fails, ends the process, or changes process-wide state.
    """
    if not Path(file).is_file():
        return  # the import reports a missing file
    process = get_plugin_process(file)
    with _wrap_errors(file, "imported"):
        if not process.alive:
            process.start()
    _check_unchanged(file, "imported", process.changed_state)


def check_method_choices(choices: Sequence[MethodChoice], files: Sequence[str]) -> None:
    """Check the same for creating the methods and reading their declarations."""
    own: dict[str | None, list[MethodChoice]] = {}
    for row in choices:
        if row.name not in registry.built_in_methods():
            own.setdefault(find_plugin_file(row.name, files), []).append(row)
    for file, method_rows in own.items():
        names = ", ".join(dict.fromkeys(row.name for row in method_rows))
        with _wrap_errors(names, "planned with"):
            changed = get_plugin_process(file).call("check_methods", method_rows)
        _check_unchanged(names, "planned with", changed)


def find_plugin_file(name: str, files: Sequence[str]) -> str | None:
    """Return the plug-in file that defines a method; None if it is installed."""
    return next((file for file in files if name in registry.load_plugin(file)), None)


def get_plugin_process(file: str | None) -> PluginProcess:
    """Return the process of a plug-in file. None selects the installed plug-ins."""
    return _processes.setdefault(file, PluginProcess(file))


def end_plugin_processes() -> None:
    """End all plug-in processes."""
    while _processes:
        _processes.popitem()[1].end()


atexit.register(end_plugin_processes)


class PluginProcess:
    """A process that runs one plug-in.

    Between orders the process and its children are suspended, so that they use no CPU time while
    other methods are measured.

    Args:
        file: The plug-in file. None selects the installed plug-ins.

    Attributes:
        changed: Names of process-wide state that the import of the plug-in changed.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._worker: WorkerProcess | None = None
        self.changed_state: list[str] = []

    @property
    def alive(self) -> bool:
        """Return True if the process was started and is not known to have ended."""
        return self._worker is not None

    def call(self, order: str, *arguments: Any, timeout_s: float = LOAD_TIMEOUT_S) -> Any:
        """Send an order and return its result; see `orders.PluginOrders`.

        Args:
            within: Maximum time in seconds.

        Raises:
            PluginProcessLost: the process ended. MethodFault: the order failed. SpecbenchError: the
                order was refused.
        """
        if self._worker is None:
            self.start()
        return self._call(order, *arguments, timeout_s=timeout_s)

    def start(self) -> None:
        """Start the process, which imports the plug-in."""
        serve = "specbench_cli.measure.isolation.orders:serve"
        self._worker = WorkerProcess(python_command(serve, str(os.getpid())), takes_orders=True)
        held, within = plugin_file.pinned_contents(), START_TIMEOUT_S + plugin.IMPORT_S
        self.changed_state = self._call("import_plugin", self._file, held, timeout_s=within)

    def end(self) -> int | None:
        """End the process and its children. Return its exit code if it had ended, else None."""
        worker, self._worker = self._worker, None
        return None if worker is None else worker.end()

    def _call(self, order: str, *arguments: Any, timeout_s: float) -> Any:
        worker = self._worker
        assert worker is not None
        try:
            worker.send(order, *arguments)
            answer = worker.receive(timeout_s)
        except KeyboardInterrupt:  # the answer will not be read
            self.end()
            raise
        except ProcessEnded:
            self._raise_lost()
        except TimeoutError as fault:
            self.end()
            raise PluginProcessLost(f"{fault}: its process was ended") from fault
        try:
            kind, found = replies.load(answer)
        except Exception as fault:
            self.end()
            raise PluginProcessLost(f"its process sent what is no answer: {fault}") from fault
        worker.suspend()
        if kind == "done":
            return found
        if kind == "failed":
            raise MethodFault(str(found))
        name, message, hint = found
        raise _ERRORS.get(name, UsageError)(message, hint)

    def _raise_lost(self) -> NoReturn:
        code = self.end()
        if code is not None and code < 0:
            raise PluginProcessLost(f"its process was killed by {signal.Signals(-code).name}")
        raise PluginProcessLost(f"it ended its process (exit code {code})")


_ERRORS = {each.__name__: each for each in (MethodFault, EnvironmentFault, WorkerLost)}


def _check_unchanged(what: str, when: str, changed: Sequence[str]) -> None:
    """Raise UsageError if a plug-in changed process-wide state."""
    if changed:
        end_plugin_processes()
        raise UsageError(
            f"{what} changes {', '.join(changed)} when it is {when}, for every method of the run",
            "change it in the method, around what needs it, and back",
        )


@contextmanager
def _wrap_errors(what: str, when: str) -> Iterator[None]:
    try:
        yield
    except MethodFault as fault:
        end_plugin_processes()
        hint = fault.hint or "it must do nothing to the process that it is in"
        raise UsageError(f"{what} cannot be {when}: {fault.message}", hint) from fault
    except SpecbenchError:
        end_plugin_processes()
        raise
