"""Drafters in a separate process, on other CPU cores or another GPU.

The process is a new Python interpreter. It loads the draft model and handles one request after
another. It ends when its transport is closed, when it does not answer in time, or when its parent
process ends. Messages go through shared memory. Nothing is pickled during decoding.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.workers.child import FAILED, ORDER, START, decode_forwards, serve
from specbench_cli.engine.workers.core_placement import CorePlacement, use_placement
from specbench_cli.engine.workers.drafter import DRAFTER
from specbench_cli.engine.workers.message import Message, Reply
from specbench_cli.engine.workers.process_lifetime import block_interrupts
from specbench_cli.engine.workers.shared_memory import SLOTS, Doorbell, MessageBuffer
from specbench_cli.engine.workers.transport import Transport, Worker, WorkerRequest
from specbench_cli.errors import EnvironmentFault, MethodFault, WorkerLost

MAX_ROWS = 128
"""Maximum number of distributions in a message."""

LOAD_TIMEOUT_S = 600.0
"""Maximum time to load a draft model, in seconds."""


class ProcessTransport(Transport):
    """Transport with one process that runs all drafters of a workspace. It starts on first use.

    Args:
        target: CPU cores of this process.
        draft: CPU cores of the draft process.
        timeout: Seconds to wait for an answer. After that, the draft process counts as lost.
    """

    def __init__(
        self,
        target: CorePlacement | None = None,
        draft: CorePlacement | None = None,
        *,
        timeout: float = 30.0,
    ) -> None:
        self._target, self._draft = target or CorePlacement(), draft or CorePlacement()
        self._timeout = timeout
        self._process: DraftProcess | None = None

    @property
    def pid(self) -> int | None:
        """PID of the draft process, or None if it has not been started."""
        return None if self._process is None else self._process.pid

    def start_worker(self, request: WorkerRequest) -> Worker:
        """Start a drafter on a request in the draft process, beginning with the drafter's prefill.

        Raises:
            WorkerLost: The process does not start.
            EnvironmentFault: The process cannot load the draft model.
        """
        if self._process is not None and self._process.has_stopped:
            self.close()
        if self._process is None:
            load_draft = request.decoder_factories["draft"]
            target = request.decoders["target"]
            self._process = DraftProcess(load_draft, self._draft, target.vocab_size, self._timeout)
        return ProcessWorker(self._process, request)

    @contextmanager
    def pin_target(self) -> Iterator[None]:
        """Pin this process to the target's cores within the context."""
        with use_placement(self._target):
            yield

    def close(self) -> None:
        """Stop the draft process."""
        if self._process is not None:
            self._process.stop()
            self._process = None


class DraftProcess:
    """Handle of the draft process, which the parent process uses.

    Attributes:
        pid: PID of the process.
        model: Name of the draft model in traces. Empty until the model is loaded.
        last_order: Number of the last order that was sent.
        last_reply: Number of the last reply that was received.
        has_stopped: True if `stop` ended the process.
    """

    def __init__(
        self,
        load_draft: Callable[[], Decoder],
        placement: CorePlacement,
        vocab: int,
        timeout: float,
    ) -> None:
        self.last_order = self.last_reply = 0
        self.has_stopped, self.model = False, ""
        self._timeout = timeout
        context = multiprocessing.get_context("spawn")
        own_end, child_end = socket.socketpair()
        self._pipe, child_pipe = context.Pipe()
        self._orders, self._replies = (MessageBuffer.create(MAX_ROWS, vocab) for _ in range(2))
        self._bell = Doorbell(own_end)
        # A new process inherits only the file descriptors that are in its arguments.
        self._process = context.Process(
            target=serve,
            args=(
                os.getpid(),
                load_draft,
                placement,
                child_end,
                child_pipe,
                self._orders,
                self._replies,
            ),
            name="specbench draft",
            daemon=True,
        )
        with block_interrupts(context):
            self._process.start()
        child_end.close()
        child_pipe.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: int, what: int) -> None:
        """Send a signal about an order or a request. Raise WorkerLost if the process has ended."""
        self.last_order = number
        try:
            self._bell.ring(number, what)
        except EOFError:
            self._raise_lost()

    def start_request(self, number: int, request: WorkerRequest) -> None:
        """Start a request, after waiting for all replies of the previous request."""
        if not self.model:
            self._wait_for_signal(LOAD_TIMEOUT_S)
            self.model = self._pipe.recv()
        while self.last_reply < self.last_order:
            with suppress(MethodFault):  # an error of a request that has already ended
                self._wait_for_signal(self._timeout)
        self.send_signal(number, START)
        try:
            home = sys.modules[request.drafter_class.__module__]
            self._pipe.send((home.__name__, getattr(home, "__file__", None)))
            self._pipe.send((request.drafter_class, request.params, request.request))
        except OSError:
            self._raise_lost()

    def send_order(self, number: int, message: Message) -> None:
        """Send an order to the drafter.

        Raises:
            MethodFault: Too many orders have no reply yet, or the message is too large.
        """
        if number - self.last_reply > SLOTS:
            raise MethodFault(f"more than {SLOTS} orders are open: receive the answers first")
        self._orders.write(number, message.ints, message.rows)
        self.send_signal(number, ORDER)

    def receive_reply(self, timeout: float | None, device: torch.device) -> Reply:
        """Return the next reply. Its rows are on the given device."""
        number = self._wait_for_signal(self._timeout if timeout is None else timeout)
        received_ns = time.perf_counter_ns()
        (read_ns, sent_ns, n, *rest), rows = self._replies.read(number, device)
        answer = None if n < 0 else Message(tuple(rest[:n]), rows)
        forwards = decode_forwards(tuple(rest[max(n, 0) :]), self.model, DRAFTER)
        return Reply(number, answer, forwards, read_ns, sent_ns, received_ns)

    def stop(self) -> None:
        """Stop the process, and wait until it has ended."""
        if self.has_stopped:
            return
        self.has_stopped = True
        self._bell.close()
        self._pipe.close()
        self._process.join(0.2)  # the closed doorbell ends the process
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._orders.close()
        self._replies.close()

    def _wait_for_signal(self, timeout: float) -> int:
        """Wait for the next signal and return its number. If an order failed, raise its error."""
        try:
            received = self._bell.wait(timeout)
        except EOFError:
            self._raise_lost()
        if received is None:
            self.stop()
            raise WorkerLost(
                f"the draft's worker (process {self.pid}) did not answer within {timeout:g} s",
                hint=_HINT,
            )
        self.last_reply, what = received
        if what == FAILED:
            known, text, hint = self._pipe.recv()
            if not self.model:  # the process could not load the draft model and has ended
                self.stop()
                raise EnvironmentFault(f"the draft's worker cannot load the draft: {text}", hint)
            raise MethodFault(text if known else f"its drafter raised {text}", hint)
        return self.last_reply

    def _raise_lost(self) -> NoReturn:
        """Raise WorkerLost with the exit status of the process."""
        self._process.join(1.0)
        code = self._process.exitcode
        self.stop()
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        raise WorkerLost(f"the draft's worker (process {self.pid}) {how}", hint=_HINT)


_HINT = "if memory ran out, choose a smaller --draft or --dtype; then resume the run"


class ProcessWorker(Worker):
    """Handle of a drafter in a separate process."""

    def __init__(self, process: DraftProcess, request: WorkerRequest) -> None:
        super().__init__(request.meter, process.last_order)
        self._process = process
        self._device = request.decoders["target"].device
        self._last_order += 1
        process.start_request(self._last_order, request)

    def _send_order(self, number: int, message: Message) -> None:
        self._process.send_order(number, message)

    def _next_reply(self, timeout: float | None) -> Reply:
        return self._process.receive_reply(timeout, self._device)
