"""A limit on the time that code of others may take in this thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def limit_time(
    seconds: float | None,
    message: str,
    error: Callable[[str], Exception] = TimeoutError,
    again_s: float = 0.0,
) -> Iterator[None]:
    """Interrupt Python code after so many seconds, where that is possible: in the main thread of a
    system that has such a timer.

    Args:
        seconds: None for no limit.
        message: the message of the error.
        error: makes what is raised in the code.
        again_s: seconds after which code that caught the error is interrupted again; 0 for never.
    """
    here = threading.current_thread() is threading.main_thread()
    if seconds is None or not here or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error(message)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, again_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
