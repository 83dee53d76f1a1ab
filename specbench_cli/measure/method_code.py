"""Calls of a method's code: its workers, its time limit, its errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from specbench_cli.engine.session import Session
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.errors import MethodFault, SpecbenchError, message_of, to_one_line
from specbench_cli.time_limit import limit_time


@contextmanager
def run_workers(session: Session, transport: Transport, parallel: bool) -> Iterator[None]:
    """Run the `with` block with the workers of a method. Wait until they are idle at the end."""
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
def enforce_time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt Python code in the `with` block after some seconds.

    This works in the main thread, on systems with interval timers.

    Raises:
        MethodFault: the time is over.
    """
    message = f"no end after {seconds or 0:g} s (--timeout-per-prompt)"
    with limit_time(seconds, message, MethodFault):
        yield


def describe_failure(failure: BaseException) -> str:
    """Return the failure, its location and its hint on one line, without paths of this machine.

    Raises:
        KeyboardInterrupt: the failure is one, so the user wants to stop the run.
    """
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    then = f"; {failure.hint}" if isinstance(failure, SpecbenchError) and failure.hint else ""
    text = message_of(failure) or "no message"
    return to_one_line(f"{type(failure).__name__}: {text}{where}{then}")
