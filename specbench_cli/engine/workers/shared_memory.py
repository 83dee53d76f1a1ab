"""Memory that two processes share, and the bell that says something new is in it.

A bell is a byte stream between the two: a system call on either side, so that what was written
before it was rung is seen by who heard it. The memory has no name, so that nothing of it is left
once both processes are gone, however they went.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from specbench_cli.errors import MethodFault

SLOTS = 8
"""Messages that a block holds: as many orders may be open."""

MAX_INTS = 1 << 13
"""Whole numbers that fit into a message."""

SPIN_NS = 100_000
"""How long a bell is listened to without sleep: a sleeper takes about as long to wake up."""

_HEADER = struct.Struct("=3q")
_SIGNAL = struct.Struct("=2q")
_ROWS_OFFSET = _HEADER.size + 8 * MAX_INTS
"""Where a message's rows begin."""


class MessageBuffer:
    """Numbered messages of whole numbers and rows of float32; one side writes, the other reads.

    A message is in its place until that with the number `SLOTS` higher is written. A block can be
    an argument of a process that is spawned, and is the same block there.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        self._stride = len(self._memory) // SLOTS
        self._max_floats = (self._stride - _ROWS_OFFSET) // 4

    @classmethod
    def create(cls, rows: int, width: int) -> MessageBuffer:
        """A block whose messages have room for so many rows."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("specbench")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        stride = -(-(_ROWS_OFFSET + 4 * rows * width) // 64) * 64
        os.truncate(fd, SLOTS * stride)  # what is never written takes no memory
        return cls(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (DupFd(self._fd),)

    def close(self) -> None:
        """Let go of it; the memory is gone when both sides have."""
        os.close(self._fd)

    def write(self, number: int, ints: Sequence[int], rows: Tensor | None) -> None:
        """Put a message in; waits for the device that holds the rows.

        Raises:
            MethodFault: it does not fit.
        """
        n, at = len(ints), number % SLOTS * self._stride
        k, width = (-1, 0) if rows is None else rows.shape
        if n > MAX_INTS or k * width > self._max_floats:
            raise MethodFault(f"a message of {n} numbers and {k} rows of {width} does not fit")
        _HEADER.pack_into(self._memory, at, n, k, width)
        struct.pack_into(f"={n}q", self._memory, at + _HEADER.size, *ints)
        if rows is not None and k * width:
            self._view_rows(at, k, width).copy_(rows)

    def read(self, number: int, device: torch.device) -> tuple[tuple[int, ...], Tensor | None]:
        """A copy of a message, its rows on a device."""
        at = number % SLOTS * self._stride
        n, k, width = _HEADER.unpack_from(self._memory, at)
        ints = struct.unpack_from(f"={n}q", self._memory, at + _HEADER.size)
        if k < 0:
            return ints, None
        if not k * width:
            return ints, torch.empty(k, width, device=device)
        return ints, self._view_rows(at, k, width).to(device, copy=True)

    def _view_rows(self, at: int, k: int, width: int) -> Tensor:
        """The rows of a message, in place."""
        floats = torch.frombuffer(
            self._memory, dtype=torch.float32, count=k * width, offset=at + _ROWS_OFFSET
        )
        return floats.view(k, width)


def _attach(descriptor: Any) -> MessageBuffer:
    return MessageBuffer(descriptor.detach())


class Doorbell:
    """One end of a bell: rung with two whole numbers."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._received = bytearray()

    def ring(self, number: int, signal: int) -> None:
        """Ring it. Raises EOFError if nobody is at the other end."""
        try:
            self._end.sendall(_SIGNAL.pack(number, signal))
        except OSError as error:
            raise EOFError from error

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """What it was rung with next; None if it was not rung in so many seconds.

        Raises:
            EOFError: nobody is at the other end any more.
        """
        start = time.perf_counter_ns()
        while len(self._received) < _SIGNAL.size:
            try:
                heard = self._end.recv(_SIGNAL.size - len(self._received))
            except BlockingIOError:
                waited = time.perf_counter_ns() - start
                if waited < SPIN_NS:
                    continue
                left = None if timeout is None else timeout - waited / 1e9
                if left is not None and left <= 0:
                    return None
                self._poll.poll(None if left is None else left * 1e3)
                continue
            except OSError as error:
                raise EOFError from error
            if not heard:
                raise EOFError
            self._received += heard
        number, what = _SIGNAL.unpack(self._received)
        self._received.clear()
        return number, what

    def close(self) -> None:
        """Close this end: the other one hears of it."""
        self._end.close()
