"""Shared memory between two processes, and a doorbell that signals new messages.

A doorbell is a pair of connected sockets. The system calls on a socket guarantee that the receiver
of a signal sees all earlier writes to the shared memory. The memory has no name, so the system
frees it when both processes end for any reason.
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
"""Number of messages in a buffer. It is also the maximum number of orders without a reply."""

MAX_INTS = 1 << 13
"""Maximum number of integers in a message."""

SPIN_NS = 100_000
"""Time to busy-wait for a signal before sleeping, in ns. Waking up takes about as long."""

_HEADER = struct.Struct("=3q")
_SIGNAL = struct.Struct("=2q")
_ROWS_OFFSET = _HEADER.size + 8 * MAX_INTS
"""Offset of the rows in a message."""


class MessageBuffer:
    """Ring buffer in shared memory for numbered messages of integers and float32 rows.

    One process writes and the other process reads. Message n + `SLOTS` overwrites message n. The
    buffer can be passed to a new process, which then uses the same memory.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        self._stride = len(self._memory) // SLOTS
        self._max_floats = (self._stride - _ROWS_OFFSET) // 4

    @classmethod
    def create(cls, rows: int, width: int) -> MessageBuffer:
        """Return a buffer for messages of up to `rows` rows with `width` floats each."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("specbench")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        stride = -(-(_ROWS_OFFSET + 4 * rows * width) // 64) * 64
        os.truncate(fd, SLOTS * stride)  # unwritten pages take no memory
        return cls(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (DupFd(self._fd),)

    def close(self) -> None:
        """Close this process's side. The memory is freed when both processes have closed their
        side.
        """
        os.close(self._fd)

    def write(self, number: int, ints: Sequence[int], rows: Tensor | None) -> None:
        """Write a message. Waits for the device that has the rows.

        Raises:
            MethodFault: The message is too large.
        """
        n, at = len(ints), number % SLOTS * self._stride
        k, width = (-1, 0) if rows is None else rows.shape
        if n > MAX_INTS or k * width > self._max_floats:
            raise MethodFault(
                f"a message of {n} integers and {k} rows of {width} numbers is too large"
            )
        _HEADER.pack_into(self._memory, at, n, k, width)
        struct.pack_into(f"={n}q", self._memory, at + _HEADER.size, *ints)
        if rows is not None and k * width:
            self._view_rows(at, k, width).copy_(rows)

    def read(self, number: int, device: torch.device) -> tuple[tuple[int, ...], Tensor | None]:
        """Return a copy of the message with a number. Its rows are on the given device."""
        at = number % SLOTS * self._stride
        n, k, width = _HEADER.unpack_from(self._memory, at)
        ints = struct.unpack_from(f"={n}q", self._memory, at + _HEADER.size)
        if k < 0:
            return ints, None
        if not k * width:
            return ints, torch.empty(k, width, device=device)
        return ints, self._view_rows(at, k, width).to(device, copy=True)

    def _view_rows(self, at: int, k: int, width: int) -> Tensor:
        """Return a view of the memory that contains the k rows of a message."""
        floats = torch.frombuffer(
            self._memory, dtype=torch.float32, count=k * width, offset=at + _ROWS_OFFSET
        )
        return floats.view(k, width)


def _attach(descriptor: Any) -> MessageBuffer:
    return MessageBuffer(descriptor.detach())


class Doorbell:
    """One end of a doorbell: a pair of sockets, with which two processes wake each other.

    A process rings after it has written to the shared memory. A signal consists of two integers.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._received = bytearray()

    def ring(self, number: int, signal: int) -> None:
        """Send a signal. Raise EOFError if the other end of the doorbell is closed."""
        try:
            self._end.sendall(_SIGNAL.pack(number, signal))
        except OSError as error:
            raise EOFError from error

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """Return the next signal. Return None if there is no signal within `timeout` seconds.

        Raises:
            EOFError: The other end of the doorbell is closed.
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
        """Close this end. The process at the other end then gets EOFError."""
        self._end.close()
