"""Drafters in a thread of this process: target and draft on one GPU, each with its own stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from specbench_cli.engine.types import Forward
from specbench_cli.engine.workers.drafter import Desk, Drafter
from specbench_cli.engine.workers.message import Message, Reply
from specbench_cli.engine.workers.transport import Hiring, Transport, Worker
from specbench_cli.errors import WorkerLost

Job = Callable[[], None]


class Threads(Transport):
    """One thread for a workspace's drafts, started when first asked for.

    The draft is the workspace's own; nobody else may run it meanwhile.

    Args:
        timeout: seconds after which a worker that does not answer counts as lost.
    """

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: Thread | None = None

    @property
    def threads(self) -> frozenset[int]:
        """See `Transport`."""
        thread = self._thread
        return frozenset() if thread is None or thread.ident is None else frozenset({thread.ident})

    def hire(self, hiring: Hiring) -> Worker:
        """See `Transport`."""
        if self._thread is None:
            device = hiring.decoders["draft"].device
            self._thread = Thread(
                target=_work, args=(self._jobs, device), name="specbench draft", daemon=True
            )
            self._thread.start()
        return ThreadWorker(hiring, self._jobs.put, self._timeout, self._abandon)

    def close(self) -> None:
        """See `Transport`."""
        thread = self._thread
        self._abandon()
        if thread is not None:
            thread.join(self._timeout)

    def _abandon(self) -> None:
        """Leave the thread to itself: it ends with the job that it is at, if that does."""
        self._jobs.put(None)
        self._jobs, self._thread = SimpleQueue(), None


class ThreadWorker(Worker):
    """A drafter in a thread.

    Args:
        do: has the thread do something, after all that it was asked to do before.
        abandon: gives the thread up.
    """

    def __init__(
        self, hiring: Hiring, do: Callable[[Job], None], timeout: float, abandon: Job
    ) -> None:
        super().__init__(hiring.meter)
        self._hiring, self._do, self._timeout, self._abandon = hiring, do, timeout, abandon
        self._device = hiring.decoders["target"].device
        self._replies: SimpleQueue[Reply | Exception] = SimpleQueue()
        self._desk: Desk | None = None
        self._drafter: Drafter | None = None
        do(self._begin)

    @property
    def desk(self) -> Desk | None:
        """See `Worker`; it is the thread's while an order is open."""
        return self._desk

    def _post(self, number: int, message: Message) -> None:
        if message.rows is not None and message.rows.is_cuda:
            torch.cuda.current_stream(message.rows.device).synchronize()
        self._do(lambda: self._carry_out(number, message))

    def _next(self, timeout: float | None) -> Reply:
        seconds = self._timeout if timeout is None else timeout
        try:
            reply = self._replies.get(timeout=seconds)
        except Empty:
            self._abandon()
            raise WorkerLost(
                f"the draft's worker (a thread) did not answer within {seconds:g} s",
                hint="go on with the run; if it hangs again, draft on another device: --devices",
            ) from None
        if isinstance(reply, Exception):
            raise reply
        reply.heard_ns = time.perf_counter_ns()
        rows = None if reply.message is None else reply.message.rows
        if rows is not None and rows.is_cuda:  # made on another stream than it is used on
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return reply

    def _rest(self) -> Sequence[Forward]:
        """See `Worker`: waits for the thread, which may be prefilling still."""
        self._do(lambda: self._tell(self._heard, None, time.perf_counter_ns()))
        return self._next(None).forwards

    def _begin(self) -> None:
        """In the thread: seat the drafter."""
        try:
            self._desk = self._hiring.desk()
            self._drafter = self._hiring.kind(self._desk, self._hiring.params)
            self._drafter.start()
        except Exception as error:  # whoever waits for an answer hears of it
            self._replies.put(error)

    def _carry_out(self, number: int, message: Message) -> None:
        """In the thread: an order."""
        if self._desk is None or self._drafter is None:
            return
        read_ns = time.perf_counter_ns()
        try:
            self._tell(number, self._drafter.handle(message), read_ns)
        except Exception as error:
            self._replies.put(error)

    def _tell(self, number: int, answer: Message | None, read_ns: int) -> None:
        """In the thread: an answer, with the forwards that led to it."""
        forwards = [] if self._desk is None else self._desk.meter.take()  # waits for the stream
        now = time.perf_counter_ns()
        self._replies.put(Reply(number, answer, forwards, read_ns, now, now))


def _work(jobs: SimpleQueue[Job | None], device: torch.device) -> None:
    """What the thread does."""
    stream: AbstractContextManager[Any] = nullcontext()
    if device.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream(device))
    with torch.inference_mode(), stream:
        while (job := jobs.get()) is not None:
            job()
