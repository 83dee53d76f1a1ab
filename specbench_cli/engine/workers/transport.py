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
from specbench_cli.engine.workers.drafter import DRAFTER, TARGET, Brief, Desk, Drafter
from specbench_cli.engine.workers.message import Message, Reply
from specbench_cli.errors import MethodFault


@dataclass(frozen=True, slots=True)
class Hiring:
    """What a transport needs to know of a request that wants a drafter.

    kind, params: the drafter's class, and the method's parameters.
    meter: the request's trace, into which the drafter's forwards go.
    decoders: of the run, by role; recipes: what makes one in another process, which they reach.
    lend: where states come from, and `chooser` how tokens are chosen, for drafters that work in the
        request's own process; None for a chooser of its own.
    """

    kind: type[Drafter]
    params: MethodParams
    brief: Brief
    decoders: Mapping[str, Decoder]
    recipes: Mapping[str, Callable[[], Decoder]]
    meter: Meter
    lend: Callable[[Decoder, int], State]
    chooser: Chooser | None = None

    def desk(self) -> Desk:
        """A desk in the request's own process."""
        return Desk(self.brief, self.decoders["draft"], self.lend, self.chooser)


class Worker(ABC):
    """A drafter at work on one request, seen from the target's side.

    Args:
        meter: where its forwards and the messages are kept.
        number: of the last order before its first.
    """

    def __init__(self, meter: Meter, number: int = 0) -> None:
        self._meter = meter
        self._ordered = self._heard = self._cancelled = number
        self._sent_ns: dict[int, tuple[int, int]] = {}

    @property
    def desk(self) -> Desk | None:
        """The drafter's desk, if it stands in this process."""
        return None

    def send(self, message: Message) -> None:
        """Give an order; returns at once, but where the drafter works in the caller's place."""
        self._ordered += 1
        self._sent_ns[self._ordered] = (time.perf_counter_ns(), message.nbytes)
        self._post(self._ordered, message)

    def receive(self, timeout: float | None = None) -> Message:
        """The next answer that is due and was not cancelled; waits for it.

        Args:
            timeout: seconds to wait; default: the transport's.
        Raises:
            WorkerLost: the worker died, or did not answer in time.
            MethodFault: no order is open, or the drafter failed.
        """
        while self._heard < self._ordered:
            reply = self._hear(timeout)
            if reply.message is not None and reply.number > self._cancelled:
                return reply.message
        raise MethodFault("waits for an answer where no order is open")

    def cancel(self) -> None:
        """Answers to the orders given so far are not wanted: they are dropped when they come, and
        their forwards count as unused."""
        self._cancelled = self._ordered

    def settle(self) -> None:
        """Cancel, and wait until the drafter has nothing more to do."""
        self.cancel()
        while self._heard < self._ordered:
            self._hear(None)
        self._meter.merge(self._rest(), used=False)

    def _rest(self) -> Sequence[Forward]:
        """The forwards of a drafter that was given no order: they came with no reply."""
        return ()

    def _hear(self, timeout: float | None) -> Reply:
        reply = self._next(timeout)
        self._heard = reply.number
        self._meter.merge(reply.forwards, used=reply.number > self._cancelled)
        sent = self._sent_ns.pop(reply.number, None)
        if sent is not None:
            self._meter.sent(TARGET, DRAFTER, sent[0], reply.read_ns, sent[1])
        if reply.message is not None:
            nbytes = reply.message.nbytes
            self._meter.sent(DRAFTER, TARGET, reply.sent_ns, reply.heard_ns, nbytes)
        return reply

    @abstractmethod
    def _post(self, number: int, message: Message) -> None:
        """Hand an order over."""

    @abstractmethod
    def _next(self, timeout: float | None) -> Reply:
        """The next reply, with rows on the target's device; see `receive` for what it raises."""


class Transport(ABC):
    """Where the drafters of a workspace run; outlives the requests."""

    @abstractmethod
    def hire(self, hiring: Hiring) -> Worker:
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
    def placed(self) -> Iterator[None]:
        """Have this process compute where it should while a drafter works beside it; everything is
        as it was afterwards."""
        yield

    def close(self) -> None:
        """End the workers; nothing is left of them."""


class Inline(Transport):
    """Drafters work in the caller's place, when an order is given: for audits, tests and tables."""

    def hire(self, hiring: Hiring) -> Worker:
        """See `Transport`."""
        return InlineWorker(hiring)


class InlineWorker(Worker):
    """A drafter in the caller's place."""

    def __init__(self, hiring: Hiring) -> None:
        super().__init__(hiring.meter)
        self._desk = hiring.desk()
        self._drafter = hiring.kind(self._desk, hiring.params)
        self._replies: deque[Reply] = deque()
        self._drafter.start()

    @property
    def desk(self) -> Desk:
        """See `Worker`."""
        return self._desk

    def _rest(self) -> Sequence[Forward]:
        return self._desk.meter.take()

    def _post(self, number: int, message: Message) -> None:
        read_ns = time.perf_counter_ns()
        answer = self._drafter.handle(message)
        forwards, now = self._desk.meter.take(), time.perf_counter_ns()
        self._replies.append(Reply(number, answer, forwards, read_ns, now, now))

    def _next(self, timeout: float | None) -> Reply:
        reply = self._replies.popleft()
        reply.heard_ns = time.perf_counter_ns()
        return reply
