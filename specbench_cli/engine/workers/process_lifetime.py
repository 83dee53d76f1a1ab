"""Lifetime of child processes: they end with their parent, and only the parent handles Ctrl-C."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext

_PR_SET_PDEATHSIG = 1
_SAFE_PATH = "PYTHONSAFEPATH"


def exit_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent process ends. This works only on Linux.

    Args:
        parent: PID of the parent process, which may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)


@contextmanager
def block_interrupts(context: BaseContext | None = None) -> Iterator[None]:
    """Start processes in this context, so that they ignore Ctrl-C from the beginning.

    A new process imports modules for seconds before it can install a signal handler. In this
    context, new interpreters also do not import modules from the working folder.

    Args:
        context: The multiprocessing context that starts the process. None if the caller starts it
            otherwise.
    """
    with ExitStack() as stack:
        if context is not None and context.get_start_method() == "spawn":
            stack.enter_context(_safe_path())
            # Start multiprocessing's resource tracker first. If spawning a process started it, it
            # would unblock interrupts.
            resource_tracker.ensure_running()
        if hasattr(signal, "pthread_sigmask"):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


@contextmanager
def _safe_path() -> Iterator[None]:
    """Prevent new Python interpreters from importing modules from the working folder.

    `multiprocessing` starts an interpreter with `python -c`, which searches the working folder
    first. If that folder had a file `multiprocessing.py`, the interpreter would run it.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def exit_on_interrupt() -> None:
    """Exit silently on Ctrl-C from now on. Call it in a process started under
    `block_interrupts`."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
