"""A process that does not outlive the one that started it, whatever ends that, and leaves Ctrl-C to
it.
"""

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
    """Have the kernel kill this process when its parent is gone; on Linux alone.

    Args:
        parent: the process that it was started by, which may be gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was quicker
            os._exit(1)


@contextmanager
def block_interrupts(context: BaseContext | None = None) -> Iterator[None]:
    """While entered, a process that is started hears no Ctrl-C from its first moment on: it imports
    for seconds before it can say what it makes of one. A fresh interpreter imports nothing from the
    working folder.

    Args:
        context: of multiprocessing, if that starts it.
    """
    with ExitStack() as stack:
        if context is not None and context.get_start_method() == "spawn":
            stack.enter_context(_safe_path())
            # Spawning starts it, and its start lets interrupts in.
            resource_tracker.ensure_running()
        if hasattr(signal, "pthread_sigmask"):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


@contextmanager
def _safe_path() -> Iterator[None]:
    """Have the interpreters that are started not look for modules in the working folder.

    `multiprocessing` starts them by `python -c`, which looks there first: a file
    `multiprocessing.py` in a folder of somebody else would run.
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
    """Have this process, which was started deaf, end at an interrupt without a word."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
