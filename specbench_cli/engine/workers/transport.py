"""Between the target's worker and a drafter: orders one way, answers the other.

A transport decides where drafters run. Whatever it is, every order gets one reply, replies come in
the order of the orders, and the drafter's forwards come with them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Forward
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.workers.drafter import (
    DRAFTER,
    TARGET,
    Drafter,
    DraftRequest,
    DraftSession,
)
from specbench_cli.engine.workers.message import Message, Reply
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What a transport needs to know of a request that wants a drafter.

    kind, params: the drafter's class, and the method's parameters.
    meter: the request's trace, into which the drafter's forwards go.
    decoders: of the run, by role; recipes: what makes one in another process, which they reach.
    lend: where states come from, and `chooser` how tokens are chosen, for drafters that work in the
        request's own process; None for a chooser of its own.
    """

    drafter_class: type[Drafter]
    params: MethodParams
    request: DraftRequest
    decoders: Mapping[str, Decoder]
    recipes: Mapping[str, Callable[[], Decoder]]
    meter: Meter
    allocate_state: Callable[[Decoder, int], State]
    chooser: Chooser | None = None

    def create_session(self) -> DraftSession:
        """A desk in the request's own process."""
        return DraftSession(self.request, self.decoders["draft"], self.allocate_state, self.chooser)


@renamed_members(desk="session", settle="drain")
class Worker(ABC):
    """A drafter at work on one request, seen from the target's side.

    Args:
        meter: where its forwards and the messages are kept.
        number: of the last order before its first.
    """

    def __init__(self, meter: Meter, number: int = 0) -> None:
        self._meter = meter
        self._last_order = self._last_reply = self._last_cancelled = number
        self._sent_ns: dict[int, tuple[int, int]] = {}

    @property
    def session(self) -> DraftSession | None:
        """The drafter's desk, if it stands in this process."""
        return None

    def send(self, message: Message) -> None:
        """Give an order; returns at once, but where the drafter works in the caller's place."""
        self._last_order += 1
        self._sent_ns[self._last_order] = (time.perf_counter_ns(), message.nbytes)
        self._send_order(self._last_order, message)

    def receive(self, timeout: float | None = None) -> Message:
        """The next answer that is due and was not cancelled; waits for it.

        Args:
            timeout: seconds to wait; default: the transport's.
        Raises:
            WorkerLost: the worker died, or did not answer in time.
            MethodFault: no order is open, or the drafter failed.
        """
        while self._last_reply < self._last_order:
            reply = self._receive_reply(timeout)
            if reply.message is not None and reply.number > self._last_cancelled:
                return reply.message
        raise MethodFault("waits for an answer where no order is open")

    def cancel(self) -> None:
        """Answers to the orders given so far are not wanted: they are dropped when they come, and
        their forwards count as unused."""
        self._last_cancelled = self._last_order

    def drain(self) -> None:
        """Cancel, and wait until the drafter has nothing more to do."""
        self.cancel()
        while self._last_reply < self._last_order:
            self._receive_reply(None)
        self._meter.merge(self._remaining_forwards(), used=False)

    def _remaining_forwards(self) -> Sequence[Forward]:
        """The forwards of a drafter that was given no order: they came with no reply."""
        return ()

    def _receive_reply(self, timeout: float | None) -> Reply:
        reply = self._next_reply(timeout)
        self._last_reply = reply.number
        self._meter.merge(reply.forwards, used=reply.number > self._last_cancelled)
        sent = self._sent_ns.pop(reply.number, None)
        if sent is not None:
            self._meter.record_message(TARGET, DRAFTER, sent[0], reply.read_ns, sent[1])
        if reply.message is not None:
            nbytes = reply.message.nbytes
            self._meter.record_message(DRAFTER, TARGET, reply.sent_ns, reply.received_ns, nbytes)
        return reply

    @abstractmethod
    def _send_order(self, number: int, message: Message) -> None:
        """Hand an order over."""

    @abstractmethod
    def _next_reply(self, timeout: float | None) -> Reply:
        """The next reply, with rows on the target's device; see `receive` for what it raises."""


class Transport(ABC):
    """Where the drafters of a workspace run; outlives the requests."""

    @abstractmethod
    def start_worker(self, request: WorkerRequest) -> Worker:
        """A drafter, started on a request: its prefill has begun."""

    @property
    def pid(self) -> int | None:
        """The process that drafters run in, if that is another one and there is one."""
        return None

    @property
    def threads(self) -> frozenset[int]:
        """Identities of the threads of this process that drafters run in."""
        return frozenset()

    @contextmanager
    def pin_target(self) -> Iterator[None]:
        """Have this process compute where it should while a drafter works beside it; everything is
        as it was afterwards."""
        yield

    def close(self) -> None:
        """End the workers; nothing is left of them."""


class InlineTransport(Transport):
    """Drafters work in the caller's place, when an order is given: for audits, tests and tables."""

    def start_worker(self, request: WorkerRequest) -> Worker:
        """See `Transport`."""
        return InlineWorker(request)


class InlineWorker(Worker):
    """A drafter in the caller's place."""

    def __init__(self, request: WorkerRequest) -> None:
        super().__init__(request.meter)
        self._session = request.create_session()
        self._drafter = request.drafter_class(self._session, request.params)
        self._replies: deque[Reply] = deque()
        self._drafter.start()

    @property
    def session(self) -> DraftSession:
        """See `Worker`."""
        return self._session

    def _remaining_forwards(self) -> Sequence[Forward]:
        return self._session.meter.take()

    def _send_order(self, number: int, message: Message) -> None:
        read_ns = time.perf_counter_ns()
        answer = self._drafter.handle(message)
        forwards, now = self._session.meter.take(), time.perf_counter_ns()
        self._replies.append(Reply(number, answer, forwards, read_ns, now, now))

    def _next_reply(self, timeout: float | None) -> Reply:
        reply = self._replies.popleft()
        reply.received_ns = time.perf_counter_ns()
        return reply
