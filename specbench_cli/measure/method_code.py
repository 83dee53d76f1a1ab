"""Calls of a method's code: its workers, its time limit, its errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from specbench_cli.engine.session import Session
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.errors import MethodFault, SpecbenchError, message_of, on_one_line
from specbench_cli.time_limit import limit_time


@contextmanager
def staffed(session: Session, transport: Transport, parallel: bool) -> Iterator[None]:
    """While entered, a method may have workers beside the target, which computes where it then
    should; afterwards they have nothing more to do, and disturb no other method."""
    with transport.pin_target() if parallel else nullcontext():
        try:
            yield
        except Exception:
            for worker in session.harness.workers:
                with suppress(Exception):  # the first failure counts
                    worker.drain()
            raise
        for worker in session.harness.workers:
            worker.drain()


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """While entered, Python code is interrupted after so many seconds; in the main thread of a
    system that has such a timer.

    Raises:
        MethodFault: it was.
    """
    message = f"no end after {seconds or 0:g} s (--timeout-per-prompt)"
    with limit_time(seconds, message, MethodFault):
        yield


def one_line(failure: BaseException) -> str:
    """The failure, where it arose and what to do about it, without a path of this machine.

    Raises:
        KeyboardInterrupt: it is one: somebody wants the run to stop.
    """
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    then = f"; {failure.hint}" if isinstance(failure, SpecbenchError) and failure.hint else ""
    text = message_of(failure) or "no message"
    return on_one_line(f"{type(failure).__name__}: {text}{where}{then}")
