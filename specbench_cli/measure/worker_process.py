"""Child processes of a run. Some measure a repeat, others run a plug-in.

This module starts child processes, sends them orders, receives their answers, and ends them. A
child process has the same module path (`sys.path`) as this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from specbench_cli.engine.workers.process_lifetime import block_interrupts

GRACE_S = (1.5, 10.0)
"""Seconds to wait for an interrupted process to end: first by itself, because it also receives
Ctrl-C, and then after SIGTERM. After that, it is killed."""

_POLL_S = 0.2
"""Seconds between two checks whether the process is alive, while waiting for its answer."""


class ProcessEnded(Exception):
    """Error: a child process ended before it answered.

    Attributes:
        code: Exit code of the process. It is negative if a signal ended the process. None if the
            process still runs but has closed its connection.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class WorkerProcess:
    """Child process. Creating the object starts it.

    Args:
        command: Command that starts the process, see `interpreter.python_command`.
        descriptors: File descriptors that the process inherits.
        takes_orders: True if this process sends orders to the child process. Then the child process
            gets a connection, whose file descriptor is the last argument of its command. It also
            gets its own session. So Ctrl-C does not reach it, and its own children are suspended
            and ended with it.
    """

    def __init__(
        self,
        command: Collection[str],
        *,
        descriptors: Collection[int] = (),
        takes_orders: bool = False,
    ) -> None:
        self._leads_session = takes_orders
        with ExitStack() as stack:
            if takes_orders:
                self._connection, theirs = Pipe()
                stack.callback(theirs.close)
                descriptors = (*descriptors, theirs.fileno())
                command = (*command, str(theirs.fileno()))
                stack.enter_context(block_interrupts())
            self._process = subprocess.Popen(
                [*command],
                pass_fds=descriptors,
                start_new_session=takes_orders,
                stdin=subprocess.DEVNULL if takes_orders else None,
            )

    def send(self, order: str, *arguments: Any) -> None:
        """Send an order to the process. The function `serve` in the process executes it.

        Args:
            order: Name of a method of the object that the process serves.
            arguments: Arguments of the method.

        Raises:
            ProcessEnded: the process has ended.
        """
        self._signal("SIGCONT")
        try:
            self._connection.send((order, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self._raise_ended()

    def receive(self, timeout_s: float) -> bytes:
        """Return the next answer of the process.

        Args:
            timeout_s: Maximum time in seconds.

        Raises:
            TimeoutError: there was no answer in time.
            ProcessEnded: the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            if self._process.poll() is not None and not self._connection.poll():
                self._raise_ended()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer after {timeout_s:g} s")
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._raise_ended()

    def suspend(self) -> None:
        """Suspend the process and its children until the next order is sent."""
        self._signal("SIGSTOP")

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code.

        It is negative if a signal ended it. If this process is interrupted while it waits, the
        child process is ended too.
        """
        try:
            return self._process.wait()
        except BaseException:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """End the process. Wait for it to end by itself, then send SIGTERM, then kill it."""
        for grace, stop in zip(GRACE_S, (self._process.terminate, self._process.kill), strict=True):
            try:
                self._process.wait(grace)
                return
            except subprocess.TimeoutExpired:
                stop()
        self._process.wait()

    def end(self) -> int | None:
        """Kill the process and its children.

        Return the exit code if the process had already ended by itself, else None.
        """
        code = self._process.poll()
        self._signal("SIGKILL")
        self._process.kill()
        self._process.wait()
        if self._leads_session:
            self._connection.close()
        return code

    def _signal(self, name: str) -> None:
        if self._leads_session:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, getattr(signal, name))

    def _raise_ended(self) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        raise ProcessEnded(self._process.poll())


def serve(worker: object, execute: Callable[[Callable[[], Any]], bytes]) -> NoReturn:
    """Execute the orders that this process receives, until its parent process ends.

    Args:
        worker: Object with a method for each order.
        execute: Function that calls the method of an order, and returns the answer as bytes. It
            must not raise an exception.
    """
    connection, own = Connection(int(sys.argv[-1])), os.getpid()
    while True:
        try:
            order, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        answer = execute(lambda: getattr(worker, order)(*arguments))  # noqa: B023
        if os.getpid() != own:  # this process is a fork made by the plug-in
            os._exit(1)
        try:
            connection.send_bytes(answer)
        except OSError:
            os._exit(0)
