"""Transports, which run drafters in parallel with the target and carry messages to them.

A drafter is the part of a parallel method that drafts. The method sends orders to its drafter, and
gets a reply to each order, in the same order. A transport decides where drafters run: in the same
thread, in another thread, or in another process. Each reply includes the forwards that the drafter
has run since the last reply.
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
    """Everything that a transport needs to start a drafter for a request.

    Attributes:
        drafter_class: Class of the drafter.
        params: Parameters of the method.
        request: Description of the request for the drafter.
        decoders: Decoders of the run, by role ("target", "draft").
        decoder_factories: Functions that load a decoder in another process, by role.
        meter: Trace of the request, which records the drafter's forwards.
        allocate_state: Function that allocates model states, for drafters in the request's own
            process.
        chooser: Object that chooses draft tokens, for drafters in the request's own process. If it
            is None, the drafter's session creates one.
    """

    drafter_class: type[Drafter]
    params: MethodParams
    request: DraftRequest
    decoders: Mapping[str, Decoder]
    decoder_factories: Mapping[str, Callable[[], Decoder]]
    meter: Meter
    allocate_state: Callable[[Decoder, int], State]
    chooser: Chooser | None = None

    def create_session(self) -> DraftSession:
        """Return a draft session in the process that decodes the request."""
        return DraftSession(self.request, self.decoders["draft"], self.allocate_state, self.chooser)


@renamed_members(desk="session", settle="drain")
class Worker(ABC):
    """Handle through which a method uses its drafter, for one request.

    Args:
        meter: Trace that records the drafter's forwards and the messages.
        number: Number of the last order before this request.
    """

    def __init__(self, meter: Meter, number: int = 0) -> None:
        self._meter = meter
        self._last_order = self._last_reply = self._last_cancelled = number
        self._sent_ns: dict[int, tuple[int, int]] = {}

    @property
    def session(self) -> DraftSession | None:
        """Session of the drafter, if the drafter is in this process. Otherwise None."""
        return None

    def send(self, message: Message) -> None:
        """Send an order to the drafter without waiting for the answer.

        A drafter in the same thread handles the order before this call returns.
        """
        self._last_order += 1
        self._sent_ns[self._last_order] = (time.perf_counter_ns(), message.nbytes)
        self._send_order(self._last_order, message)

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next answer to an order that was not cancelled, and return it.

        Args:
            timeout: Seconds to wait. None uses the timeout of the transport.

        Raises:
            WorkerLost: The worker died, or did not answer in time.
            MethodFault: There is no order without a reply, or the drafter failed.
        """
        while self._last_reply < self._last_order:
            reply = self._receive_reply(timeout)
            if reply.message is not None and reply.number > self._last_cancelled:
                return reply.message
        raise MethodFault("the method waits for an answer, but no order is open")

    def cancel(self) -> None:
        """Cancel all orders sent so far.

        Their answers are dropped. The drafter's forwards for them are recorded as unused.
        """
        self._last_cancelled = self._last_order

    def drain(self) -> None:
        """Cancel all orders, and wait until the drafter has nothing left to do."""
        self.cancel()
        while self._last_reply < self._last_order:
            self._receive_reply(None)
        self._meter.merge(self._remaining_forwards(), used=False)

    def _remaining_forwards(self) -> Sequence[Forward]:
        """Return the forwards that no reply has included, e.g. forwards of the prefill."""
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
        """Send an order to the drafter."""

    @abstractmethod
    def _next_reply(self, timeout: float | None) -> Reply:
        """Return the next reply. Its rows are on the target's device. Raise the errors of
        `receive`.
        """


class Transport(ABC):
    """Base class of transports. A transport runs the drafters of a workspace."""

    @abstractmethod
    def start_worker(self, request: WorkerRequest) -> Worker:
        """Start a drafter on a request, beginning with its prefill."""

    @property
    def pid(self) -> int | None:
        """PID of the draft process, or None if drafters run in this process."""
        return None

    @property
    def threads(self) -> frozenset[int]:
        """Identifiers of the threads of this process that run drafters."""
        return frozenset()

    @contextmanager
    def pin_target(self) -> Iterator[None]:
        """Pin this process to the target's cores within the context, then restore the previous
        cores.
        """
        yield

    def close(self) -> None:
        """Stop all workers of this transport and release their resources."""


class InlineTransport(Transport):
    """Transport that runs a drafter in the caller's thread, inside `Worker.send`.

    Audits and tests use it.
    """

    def start_worker(self, request: WorkerRequest) -> Worker:
        """Start a drafter on a request in the caller's thread, beginning with the drafter's
        prefill.
        """
        return InlineWorker(request)


class InlineWorker(Worker):
    """Handle of a drafter that runs in the caller's thread."""

    def __init__(self, request: WorkerRequest) -> None:
        super().__init__(request.meter)
        self._session = request.create_session()
        self._drafter = request.drafter_class(self._session, request.params)
        self._replies: deque[Reply] = deque()
        self._drafter.start()

    @property
    def session(self) -> DraftSession:
        """Session of the drafter."""
        return self._session

    def _remaining_forwards(self) -> Sequence[Forward]:
        return self._session.meter.take()

    def _send_order(self, number: int, message: Message) -> None:
        read_ns = time.perf_counter_ns()
        answer = self._drafter.handle(message)
        forwards, now_ns = self._session.meter.take(), time.perf_counter_ns()
        self._replies.append(Reply(number, answer, forwards, read_ns, now_ns, now_ns))

    def _next_reply(self, timeout: float | None) -> Reply:
        reply = self._replies.popleft()
        reply.received_ns = time.perf_counter_ns()
        return reply
