"""Helpers that call a method's code: they manage its workers, its time limit and its errors."""

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
    """Run the `with` block, in which a method may use workers. Then wait until they are idle.

    Args:
        session: The session that the method decodes.
        transport: Connection to the workers.
        parallel: True if the method has parallel workers.
    """
    with transport.pin_target() if parallel else nullcontext():
        try:
            yield
        except Exception:
            for worker in session.harness.workers:
                with suppress(Exception):  # the exception of the method is raised instead
                    worker.drain()
            raise
        for worker in session.harness.workers:
            worker.drain()


@contextmanager
def enforce_time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt the `with` block after some seconds.

    If `seconds` is None, there is no limit. The limit works only in the main thread, and only on
    systems with interval timers.

    Raises:
        MethodFault: the `with` block took longer than the limit.
    """
    message = f"not finished after {seconds or 0:g} s (--timeout-per-prompt)"
    with limit_time(seconds, message, MethodFault):
        yield


def describe_failure(failure: BaseException) -> str:
    """Return an exception's message, location and hint on one line, without paths.

    Raises:
        KeyboardInterrupt: the exception is a KeyboardInterrupt, because the user stops the run.
    """
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    then = f"; {failure.hint}" if isinstance(failure, SpecbenchError) and failure.hint else ""
    text = message_of(failure) or "no message"
    return to_one_line(f"{type(failure).__name__}: {text}{where}{then}")
