"""Drafters in a process of their own: other cores, or another GPU.

The process is a fresh interpreter, loads the draft itself, serves one request after another, and is
gone when its transport is closed, when it does not answer in time, or with the process that started
it. Numbers and distributions go through shared memory; nothing is pickled while a request is
decoded.
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
"""Distributions that a message has room for."""

LOAD_TIMEOUT_S = 600.0
"""The longest that a draft may take to load."""


class ProcessTransport(Transport):
    """One process for a workspace's drafts, started when first asked for.

    Args:
        target, draft: where this process, and where the draft's computes.
        timeout: seconds after which a worker that does not answer counts as lost.
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
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    def start_worker(self, request: WorkerRequest) -> Worker:
        """See `Transport`.

        Raises:
            WorkerLost: the process does not start.
            EnvironmentFault: the draft cannot be loaded there.
        """
        if self._process is not None and self._process.has_stopped:
            self.close()
        if self._process is None:
            recipe = request.recipes["draft"]
            target = request.decoders["target"]
            self._process = DraftProcess(recipe, self._draft, target.vocab_size, self._timeout)
        return ProcessWorker(self._process, request)

    @contextmanager
    def pin_target(self) -> Iterator[None]:
        """See `Transport`."""
        with use_placement(self._target):
            yield

    def close(self) -> None:
        """See `Transport`."""
        if self._process is not None:
            self._process.stop()
            self._process = None


class DraftProcess:
    """The process, seen from the one that started it.

    Attributes:
        pid: its number.
        model: the draft's name in traces, once it is loaded.
        number, heard: of the last order, and of the last reply.
        ended: whether it was ended from here.
    """

    def __init__(
        self, recipe: Callable[[], Decoder], place: CorePlacement, vocab: int, timeout: float
    ) -> None:
        self.last_order = self.last_reply = 0
        self.has_stopped, self.model = False, ""
        self._timeout = timeout
        context = multiprocessing.get_context("spawn")
        mine, theirs = socket.socketpair()
        self._pipe, their_line = context.Pipe()
        self._orders, self._replies = (MessageBuffer.create(MAX_ROWS, vocab) for _ in range(2))
        self._bell = Doorbell(mine)
        # A process is spawned with the descriptors that its arguments name, and no others.
        self._process = context.Process(
            target=serve,
            args=(os.getpid(), recipe, place, theirs, their_line, self._orders, self._replies),
            name="specbench draft",
            daemon=True,
        )
        with block_interrupts(context):
            self._process.start()
        theirs.close()
        their_line.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send_signal(self, number: int, what: int) -> None:
        """Ring."""
        self.last_order = number
        try:
            self._bell.ring(number, what)
        except EOFError:
            self._raise_lost()

    def start_request(self, number: int, request: WorkerRequest) -> None:
        """Have it begin with a request, once it has done with the one before."""
        if not self.model:
            self._wait_for_signal(LOAD_TIMEOUT_S)
            self.model = self._pipe.recv()
        while self.last_reply < self.last_order:
            with suppress(MethodFault):  # of nobody's who is still there
                self._wait_for_signal(self._timeout)
        self.send_signal(number, START)
        try:
            home = sys.modules[request.drafter_class.__module__]
            self._pipe.send((home.__name__, getattr(home, "__file__", None)))
            self._pipe.send((request.drafter_class, request.params, request.request))
        except OSError:
            self._raise_lost()

    def send_order(self, number: int, message: Message) -> None:
        """Give it an order.

        Raises:
            MethodFault: too many are open, or it does not fit.
        """
        if number - self.last_reply > SLOTS:
            raise MethodFault(f"more than {SLOTS} orders are open: receive the answers first")
        self._orders.write(number, message.ints, message.rows)
        self.send_signal(number, ORDER)

    def receive_reply(self, timeout: float | None, device: torch.device) -> Reply:
        """The next reply, its rows on a device."""
        number = self._wait_for_signal(self._timeout if timeout is None else timeout)
        heard_ns = time.perf_counter_ns()
        (read_ns, sent_ns, n, *rest), rows = self._replies.read(number, device)
        answer = None if n < 0 else Message(tuple(rest[:n]), rows)
        forwards = decode_forwards(tuple(rest[max(n, 0) :]), self.model, DRAFTER)
        return Reply(number, answer, forwards, read_ns, sent_ns, heard_ns)

    def stop(self) -> None:
        """End it, and wait until it is gone."""
        if self.has_stopped:
            return
        self.has_stopped = True
        self._bell.close()
        self._pipe.close()
        self._process.join(0.2)  # it hears that nobody is there
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._orders.close()
        self._replies.close()

    def _wait_for_signal(self, timeout: float) -> int:
        """The number that its bell is rung with next; raises what went wrong there."""
        try:
            rung = self._bell.wait(timeout)
        except EOFError:
            self._raise_lost()
        if rung is None:
            self.stop()
            raise WorkerLost(
                f"the draft's worker (process {self.pid}) did not answer within {timeout:g} s",
                hint=_HINT,
            )
        self.last_reply, what = rung
        if what == FAILED:
            known, text, hint = self._pipe.recv()
            if not self.model:  # it could not load the draft, and has gone
                self.stop()
                raise EnvironmentFault(f"the draft's worker cannot load the draft: {text}", hint)
            raise MethodFault(text if known else f"its drafter raised {text}", hint)
        return self.last_reply

    def _raise_lost(self) -> NoReturn:
        """Raises WorkerLost."""
        self._process.join(1.0)
        code = self._process.exitcode
        self.stop()
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        raise WorkerLost(f"the draft's worker (process {self.pid}) {how}", hint=_HINT)


_HINT = "if memory ran out, choose a smaller --draft or --dtype; then go on with the run"


class ProcessWorker(Worker):
    """A drafter in a process of its own."""

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
