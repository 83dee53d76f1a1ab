"""Limits on the time and memory of untrusted code that runs in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_AGAIN_S = 1.0
"""Seconds between two signals: the code under the limit can swallow the first exception."""


class OutOfTime(BaseException):
    """The code ran longer than its limit.

    Not an Exception: Jinja's compiler catches those of the constants that it folds.
    """


@contextmanager
def resource_limits(seconds: float, extra_bytes: int) -> Iterator[None]:
    """While entered, interrupt the code after some seconds and bound the memory that it allocates.

    Seconds are of processor time, which is the same on a busy machine. They are limited in the main
    thread of a system that has such a timer, memory on Linux.

    Raises:
        OutOfTime: the time is up. MemoryError: the code asked for more memory.
    """
    with _memory(extra_bytes), _time(seconds):
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    here = threading.current_thread() is threading.main_thread()
    if not here or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


@contextmanager
def _memory(extra_bytes: int) -> Iterator[None]:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # a system that counts no address space
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + extra_bytes
    if soft != resource.RLIM_INFINITY and soft < most:
        yield  # a lower limit holds already
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
