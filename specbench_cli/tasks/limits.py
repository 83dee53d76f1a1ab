"""Limits on the time and memory of untrusted code that runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specbench_cli.time_limit import limit_time

_AGAIN_S = 1.0
"""Seconds between two signals, because the limited code may catch the first exception."""


class TimeLimitExceeded(BaseException):
    """Error for code that ran longer than its limit.

    It is not a subclass of Exception. Jinja's compiler catches every Exception while it evaluates
    constants, so it would hide this error.
    """


@contextmanager
def resource_limits(seconds: float, extra_bytes: int) -> Iterator[None]:
    """Limit the CPU time and the memory of the code in a `with` block.

    CPU time is limited only in the main thread and if the system has `setitimer`. Memory is limited
    only on Linux. Unlike wall time, CPU time does not depend on the load of the machine.

    Args:
        seconds: limit of CPU time in seconds.
        extra_bytes: memory in bytes that the code may allocate.

    Raises:
        TimeLimitExceeded: the time limit is exceeded.
        MemoryError: the memory limit is exceeded.
    """
    with _memory(extra_bytes), limit_time(seconds, "", TimeLimitExceeded, _AGAIN_S, cpu=True):
        yield


@contextmanager
def _memory(extra_bytes: int) -> Iterator[None]:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # this system does not report the address space
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + extra_bytes
    if soft != resource.RLIM_INFINITY and soft < most:
        yield  # a lower limit applies already
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
