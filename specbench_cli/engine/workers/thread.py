"""Drafters that run in a thread of this process.

They are used, for example, if the target and the draft model share one GPU. Each of the two models
then has its own CUDA stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from specbench_cli.engine.types import Forward
from specbench_cli.engine.workers.drafter import Drafter, DraftSession
from specbench_cli.engine.workers.message import Message, Reply
from specbench_cli.engine.workers.transport import Transport, Worker, WorkerRequest
from specbench_cli.errors import WorkerLost

Job = Callable[[], None]


class ThreadTransport(Transport):
    """Transport with one thread that runs all drafters of a workspace. It starts on first use.

    The thread uses the draft model of the workspace, so no other thread may run that model.

    Args:
        timeout: Seconds to wait for an answer. After that, the thread counts as lost.
    """

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: Thread | None = None

    @property
    def threads(self) -> frozenset[int]:
        """Identifiers of the threads of this process that run drafters."""
        thread = self._thread
        return frozenset() if thread is None or thread.ident is None else frozenset({thread.ident})

    def start_worker(self, request: WorkerRequest) -> Worker:
        """Start a drafter on a request in the thread, beginning with the drafter's prefill."""
        if self._thread is None:
            device = request.decoders["draft"].device
            self._thread = Thread(
                target=_run_jobs, args=(self._jobs, device), name="specbench draft", daemon=True
            )
            self._thread.start()
        return ThreadWorker(request, self._jobs.put, self._timeout, self._abandon)

    def close(self) -> None:
        """Stop the thread."""
        thread = self._thread
        self._abandon()
        if thread is not None:
            thread.join(self._timeout)

    def _abandon(self) -> None:
        """Stop using the thread, without waiting for it. It ends after its current job."""
        self._jobs.put(None)
        self._jobs, self._thread = SimpleQueue(), None


class ThreadWorker(Worker):
    """A drafter that runs in a thread of this process.

    Args:
        submit: Function that puts a job into the thread's queue.
        abandon: Function that stops using the thread.
    """

    def __init__(
        self, request: WorkerRequest, submit: Callable[[Job], None], timeout: float, abandon: Job
    ) -> None:
        super().__init__(request.meter)
        self._request, self._submit, self._timeout, self._abandon = (
            request,
            submit,
            timeout,
            abandon,
        )
        self._device = request.decoders["target"].device
        self._replies: SimpleQueue[Reply | Exception] = SimpleQueue()
        self._session: DraftSession | None = None
        self._drafter: Drafter | None = None
        submit(self._start_drafter)

    @property
    def session(self) -> DraftSession | None:
        """Session of the drafter. While an order has no reply, only the thread may use it."""
        return self._session

    def _send_order(self, number: int, message: Message) -> None:
        if message.rows is not None and message.rows.is_cuda:
            torch.cuda.current_stream(message.rows.device).synchronize()
        self._submit(lambda: self._handle_order(number, message))

    def _next_reply(self, timeout: float | None) -> Reply:
        seconds = self._timeout if timeout is None else timeout
        try:
            reply = self._replies.get(timeout=seconds)
        except Empty:
            self._abandon()
            raise WorkerLost(
                f"the draft's worker (a thread) did not answer within {seconds:g} s",
                hint="resume the run; if it hangs again, draft on another device with --devices",
            ) from None
        if isinstance(reply, Exception):
            raise reply
        reply.received_ns = time.perf_counter_ns()
        rows = None if reply.message is None else reply.message.rows
        if rows is not None and rows.is_cuda:  # computed on another stream
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return reply

    def _remaining_forwards(self) -> Sequence[Forward]:
        """Return the forwards that no reply has included.

        Wait for the thread first, because it may still run the prefill.
        """
        self._submit(lambda: self._send_reply(self._last_reply, None, time.perf_counter_ns()))
        return self._next_reply(None).forwards

    def _start_drafter(self) -> None:
        """Create the drafter and let it prefill. Runs in the thread."""
        try:
            self._session = self._request.create_session()
            self._drafter = self._request.drafter_class(self._session, self._request.params)
            self._drafter.start()
        except Exception as error:  # `_next_reply` raises it
            self._replies.put(error)

    def _handle_order(self, number: int, message: Message) -> None:
        """Handle an order of the method. Runs in the thread."""
        if self._session is None or self._drafter is None:
            return
        read_ns = time.perf_counter_ns()
        try:
            self._send_reply(number, self._drafter.handle(message), read_ns)
        except Exception as error:
            self._replies.put(error)

    def _send_reply(self, number: int, answer: Message | None, read_ns: int) -> None:
        """Send an answer, with the forwards since the last reply. Runs in the thread."""
        forwards = (
            [] if self._session is None else self._session.meter.take()
        )  # waits for the stream
        now_ns = time.perf_counter_ns()
        self._replies.put(Reply(number, answer, forwards, read_ns, now_ns, now_ns))


def _run_jobs(jobs: SimpleQueue[Job | None], device: torch.device) -> None:
    """Run queued jobs until the queue returns None. Runs in the thread."""
    stream: AbstractContextManager[Any] = nullcontext()
    if device.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream(device))
    with torch.inference_mode(), stream:
        while (job := jobs.get()) is not None:
            job()
