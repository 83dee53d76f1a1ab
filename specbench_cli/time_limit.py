"""Time limit for code that is not part of specbench, such as plug-ins. It works in the main
thread.
"""

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
    error: Callable[[str], BaseException] = TimeoutError,
    again_s: float = 0.0,
    *,
    cpu: bool = False,
) -> Iterator[None]:
    """Raise an error in the `with` block if it takes longer than the time limit.

    Outside the main thread, and on systems without `signal.setitimer`, there is no limit.

    Args:
        seconds: time limit in seconds; None for no limit.
        message: message of the error.
        error: function of the message that returns the exception to raise.
        again_s: interval in seconds to raise the error again if the code catches it; 0: never.
        cpu: limit the CPU time of this process instead of the elapsed time.
    """
    here = threading.current_thread() is threading.main_thread()
    if seconds is None or not here or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise error(message)

    timer = signal.ITIMER_PROF if cpu else signal.ITIMER_REAL
    signal_number = signal.SIGPROF if cpu else signal.SIGALRM
    before = signal.signal(signal_number, stop)
    signal.setitimer(timer, seconds, again_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(signal_number, before)
