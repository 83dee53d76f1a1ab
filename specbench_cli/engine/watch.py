"""A decoding seen from outside of the method that decodes: its clock, its forwards, its helpers.

All that a session knows of its own time and work passes through objects that a method can reach.
What is read here is out of its reach: the clock of whoever measures, the forwards that every model
counts itself, and the threads and processes of this program.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence

from specbench_cli.engine.learning import Memory, calls_of
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Forward
from specbench_cli.engine.workspace import Workspace


class Watch:
    """Watches the decoding of a request, or of several together, from before its first line on.

    Args:
        workspace: whose models may run.
        memory: of the row, whose trained copies may run.

    Attributes:
        began_ns, ended_ns: of the decoding, in nanoseconds of the monotonic clock.
    """

    def __init__(self, workspace: Workspace, memory: Memory) -> None:
        self._workspace, self._memory = workspace, memory
        self._ran = {id(model): (model, model.ran) for model in workspace.models(memory)}
        self._called = {id(made): calls_of(made) for made in memory.copies}
        self._threads, self._processes = _threads(), _processes()
        self._sessions: Sequence[Session] = ()
        self.began_ns = self.ended_ns = 0

    def begin(self, *sessions: Session) -> None:
        """Start the clock of requests that are decoded together; the method comes next."""
        for session in sessions:
            session.harness.begin()
        self._sessions = sessions
        self._starts = [_starts(session) for session in sessions]
        self.began_ns = min(start for start, _ in self._starts)

    def end(self) -> None:
        """The method has returned."""
        self.ended_ns = time.perf_counter_ns()

    def fault(self, meter: Meter) -> str | None:
        """What contradicts what the sessions say, once all of the trace is in `meter` and in
        nanoseconds; None if nothing does."""
        found = self._wrong_clock() or self.helpers()
        return found or self._unmetered(meter) or _beside(meter.forwards)

    def helpers(self) -> str | None:
        """Who works beside the method that the run did not place there."""
        transport = self._workspace.transport
        threads = len(_threads() - self._threads - transport.threads)
        if threads:
            return f"{threads} threads of its own are at work, unseen by the clock"
        processes = len(_processes() - self._processes - {transport.pid})
        if processes:
            return f"{processes} processes of its own are at work, unseen by the clock"
        return None

    def _wrong_clock(self) -> str | None:
        for session, start in zip(self._sessions, self._starts, strict=True):
            text = session.harness.text
            if _starts(session) != start:
                late = (_starts(session)[0] - start[0]) / 1e6
                return f"its clock was started again, {late:.3g} ms after the beginning"
            if not start[0] <= text.first_ns <= text.last_ns <= self.ended_ns:
                return "its clock was moved: tokens came before it began, or after it ended"
        return None

    def _unmetered(self, meter: Meter) -> str | None:
        counted: Counter[str] = Counter()
        for model in self._workspace.models(self._memory):
            counted[model.name] += model.ran - self._before(model)
        apart = self._workspace.transport.pid is not None  # its own process counts for itself
        told = Counter(f.model for f in meter.forwards if not (apart and f.worker))
        for made in self._memory.copies:
            if not isinstance(made, Decoder):
                continue  # a module that nobody meters
            called = calls_of(made) - self._called.get(id(made), 0)
            # What publishes computes apart from its module; others call it, once a forward.
            own = 0 if hasattr(made, "publish") else made.ran - self._before(made)
            if called > own:
                return f"the module of {made.name}, its own copy, was called past the meter"
        for name in {*counted, *told}:
            if counted[name] != told[name]:
                return (
                    f"the {name} counts {counted[name]} forwards where the trace has {told[name]}:"
                    " some went past the meter"
                )
        return None

    def _before(self, model: Decoder | FeatureHead) -> int:
        """Its count at the beginning; 0 of one made since."""
        return self._ran.get(id(model), (model, 0))[1]


def _starts(session: Session) -> tuple[int, int]:
    return session.harness.text.started_ns, session.harness.meter.clock.zero_ns


def _threads() -> set[int]:
    """Identities of the threads of this process that run Python."""
    return set(sys._current_frames())


def _processes() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def _beside(forwards: Sequence[Forward]) -> str | None:
    """Forwards of one worker that ran at the same time; a worker is one line of work."""
    ends: dict[int, int] = {}
    for forward in forwards:
        if forward.t0_ns < ends.get(forward.worker, forward.t0_ns):
            return f"two forwards of worker {forward.worker} ran at the same time, in two threads"
        ends[forward.worker] = forward.t1_ns
    return None
