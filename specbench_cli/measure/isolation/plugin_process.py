"""Plug-in processes. Each process imports one plug-in file and runs the methods of this plug-in.

This module starts the processes and sends orders to them. It runs in the main process of the
run.
"""

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
"""Maximum time in seconds of an order without another limit, such as loading models."""
START_TIMEOUT_S = 120.0
"""Maximum time in seconds to start a process and import torch in it."""

_processes: dict[str | None, PluginProcess] = {}


class PluginProcessLost(MethodFault):
    """Error: a plug-in process ended, or did not answer in time.

    The next order starts a new process.
    """


def check_plugins(config: RunConfig) -> None:
    """Import each plug-in of a configuration in a plug-in process, and create its methods there.

    Do nothing if the configuration has no isolation (`--isolation none`).

    Raises:
        UsageError: a plug-in cannot be imported, or changes process-wide state.
    """
    if config.isolation != "process":
        return
    for path in config.plugins:
        check_plugin_import(path)
        registry.load_plugin(path)
    check_method_choices(config.methods, config.plugins)


def check_plugin_import(file: str) -> None:
    """Import a plug-in file in a plug-in process, to check it before the main process imports it.

    Raises:
        UsageError: the import fails, ends the process, or changes process-wide state.
    """
    if not Path(file).is_file():
        return  # this process reports a missing file when it imports the plug-in
    process = get_plugin_process(file)
    with _wrap_errors(file, "imported"):
        if not process.alive:
            process.start()
    _check_unchanged(file, "imported", process.changed_state)


def check_method_choices(choices: Sequence[MethodChoice], files: Sequence[str]) -> None:
    """Create the methods of plug-ins in the plug-in processes, to check them.

    Args:
        choices: The methods of the configuration.
        files: The plug-in files.

    Raises:
        UsageError: a method cannot be created, or creating it changes process-wide state.
    """
    by_file: dict[str | None, list[MethodChoice]] = {}
    for row in choices:
        if row.name not in registry.built_in_methods():
            by_file.setdefault(find_plugin_file(row.name, files), []).append(row)
    for file, own in by_file.items():
        names = ", ".join(dict.fromkeys(row.name for row in own))
        with _wrap_errors(names, "planned with"):
            changed = get_plugin_process(file).call("check_methods", own)
        _check_unchanged(names, "planned with", changed)


def find_plugin_file(name: str, files: Sequence[str]) -> str | None:
    """Return the plug-in file that defines a method.

    Return None if an installed plug-in defines it.
    """
    return next((file for file in files if name in registry.load_plugin(file)), None)


def get_plugin_process(file: str | None) -> PluginProcess:
    """Return the process of a plug-in file.

    If `file` is None, return the process of installed plug-ins.
    """
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
        file: The plug-in file. None imports the installed plug-ins.

    Attributes:
        changed_state: Names of process-wide state that the import of the plug-in changed.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._worker: WorkerProcess | None = None
        self.changed_state: list[str] = []

    @property
    def alive(self) -> bool:
        """True if the process was started, and no order has reported its end."""
        return self._worker is not None

    def call(self, order: str, *arguments: Any, timeout_s: float = LOAD_TIMEOUT_S) -> Any:
        """Send an order to the process and return its result. Start the process if needed.

        Args:
            order: Name of a method of `orders.PluginOrders`.
            arguments: Arguments of this method.
            timeout_s: Maximum time in seconds until the process answers.

        Raises:
            PluginProcessLost: the process ended, or did not answer in time.
            MethodFault: the code of the plug-in raised an exception.
            SpecbenchError: specbench's own code in the plug-in process raised this error.
        """
        if self._worker is None:
            self.start()
        return self._call(order, *arguments, timeout_s=timeout_s)

    def start(self) -> None:
        """Start the process, and import the plug-in in it."""
        serve = "specbench_cli.measure.isolation.orders:serve"
        self._worker = WorkerProcess(python_command(serve, str(os.getpid())), takes_orders=True)
        contents, limit = plugin_file.pinned_contents(), START_TIMEOUT_S + plugin.IMPORT_S
        self.changed_state = self._call("import_plugin", self._file, contents, timeout_s=limit)

    def end(self) -> int | None:
        """End the process and its children.

        Return the exit code if the process had already ended by itself, else None.
        """
        worker, self._worker = self._worker, None
        return None if worker is None else worker.end()

    def _call(self, order: str, *arguments: Any, timeout_s: float) -> Any:
        worker = self._worker
        assert worker is not None
        try:
            worker.send(order, *arguments)
            answer = worker.receive(timeout_s)
        except KeyboardInterrupt:  # end the process, because nothing will read its answer
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
            raise PluginProcessLost(f"its process sent an invalid answer: {fault}") from fault
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
        raise PluginProcessLost(f"its process ended with exit code {code}")


_ERRORS = {each.__name__: each for each in (MethodFault, EnvironmentFault, WorkerLost)}


def _check_unchanged(what: str, when: str, changed: Sequence[str]) -> None:
    """Raise UsageError if code of a plug-in changed process-wide state.

    Args:
        what: Name of the plug-in, for the message.
        when: Description of the code that ran, for the message.
        changed: Names of the changed state.
    """
    if changed:
        end_plugin_processes()
        raise UsageError(
            f"{what} changes {', '.join(changed)} when it is {when}, which affects all methods of"
            " the run",
            "change such state only while the method decodes, and restore it afterwards",
        )


@contextmanager
def _wrap_errors(what: str, when: str) -> Iterator[None]:
    try:
        yield
    except MethodFault as fault:
        end_plugin_processes()
        hint = fault.hint or "a plug-in must not end or change the process that imports it"
        raise UsageError(f"{what} cannot be {when}: {fault.message}", hint) from fault
    except SpecbenchError:
        end_plugin_processes()
        raise
