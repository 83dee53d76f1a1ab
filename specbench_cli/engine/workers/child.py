"""Main function of the draft process: it loads the draft model and handles orders.

An order is a message from the method to its drafter. The draft process ends when its parent process
ends for any reason. On Linux, the kernel kills it. On other systems, it detects that the parent's
end of the socket (the doorbell) is closed.
"""

from __future__ import annotations

import gc
import importlib.util
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import torch

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import Forward, Role
from specbench_cli.engine.workers.core_placement import CorePlacement, apply_placement
from specbench_cli.engine.workers.drafter import Drafter, DraftSession
from specbench_cli.engine.workers.message import Message
from specbench_cli.engine.workers.process_lifetime import exit_with_parent
from specbench_cli.engine.workers.shared_memory import Doorbell, MessageBuffer
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault, SpecbenchError, message_of, to_one_line

START, ORDER = 1, 2
"""Signals to the draft process: a request is in the pipe, or an order is in shared memory."""

READY, REPLY, FAILED = 1, 2, 3
"""Signals from the draft process: the draft model is loaded, a reply is in shared memory, or an
error is in the pipe."""

ROLES: tuple[Role, ...] = get_args(Role)
FORWARD_FIELDS = 8
"""Number of integers that encode a forward in a reply. One of them has the bits of a double."""

CAPACITY_STEP = 512
"""The capacity of states is a multiple of this number of rows."""


def serve(
    parent: int,
    load_draft: Callable[[], Decoder],
    placement: CorePlacement,
    end: socket.socket,
    pipe: Connection,
    orders: MessageBuffer,
    replies: MessageBuffer,
) -> None:
    """Run the draft process until the parent process ends or closes the connection.

    Args:
        parent: PID of the parent process.
        load_draft: Function that loads the draft model.
    """
    exit_with_parent(parent)
    for name in ("SIGINT", "SIGHUP"):  # the parent handles these and ends this process
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    apply_placement(placement)
    bell = Doorbell(end)
    try:
        try:
            decoder = load_draft()
        except Exception as error:
            pipe.send(_describe_error(error))
            bell.ring(0, FAILED)
            return
        gc.collect()
        gc.freeze()  # garbage collection need not look at the model again
        pipe.send(decoder.name)
        bell.ring(0, READY)
        with torch.inference_mode():
            _handle_orders(decoder, bell, pipe, orders, replies)
    except (EOFError, BrokenPipeError):
        pass  # the other side is gone


def _handle_orders(
    decoder: Decoder,
    bell: Doorbell,
    pipe: Connection,
    orders: MessageBuffer,
    replies: MessageBuffer,
) -> None:
    """Handle the method's orders one after another, and send a reply to each."""
    workspace = Workspace({"draft": decoder}, 0)
    while True:
        received = bell.wait()
        assert received is not None
        number, what = received
        read_ns = time.perf_counter_ns()
        answer, ran = None, decoder.ran
        try:
            if what == START:
                import_by_path(*pipe.recv())
                session, drafter = _create_drafter(workspace, decoder, *pipe.recv())
                drafter.start()
            else:
                answer = drafter.handle(Message(*orders.read(number, session.device)))
            took = session.meter.take()
            if len(took) != decoder.ran - ran:
                raise MethodFault(
                    f"the drafter ran {decoder.ran - ran} forwards, but recorded {len(took)}"
                )
            encoded = _encode_forwards(took)
            ints = () if answer is None else answer.ints
            head = (read_ns, time.perf_counter_ns(), -1 if answer is None else len(ints))
            replies.write(number, (*head, *ints, *encoded), None if answer is None else answer.rows)
        except Exception as error:
            pipe.send(_describe_error(error))
            bell.ring(number, FAILED)
        else:
            bell.ring(number, REPLY)


def import_by_path(module: str, file: str | None) -> None:
    """Import the module of a drafter class. If a plug-in defines it, import it from its file."""
    if file is None or module in sys.modules or importlib.util.find_spec(module) is not None:
        return
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is not None:
        sys.modules[module] = importlib.util.module_from_spec(spec)
        source = Path(file).read_bytes()  # not bytecode, which may be outdated
        exec(compile(source, file, "exec"), vars(sys.modules[module]))  # noqa: S102


def _create_drafter(
    workspace: Workspace, decoder: Decoder, kind: type[Drafter], params: Any, request: Any
) -> tuple[DraftSession, Drafter]:
    if request.capacity > workspace.capacity:  # grow in large steps: it takes measured time
        workspace.reserve(-(-request.capacity // CAPACITY_STEP) * CAPACITY_STEP)
    session = DraftSession(request, decoder, workspace.create_allocator())
    return session, kind(session, params)


def _encode_forwards(forwards: list[Forward]) -> list[int]:
    encoded: list[int] = []
    for f in forwards:
        (share,) = struct.unpack("=q", struct.pack("=d", f.share))
        encoded += (ROLES.index(f.role), f.batch, f.n_tokens, *f.layers, f.t0_ns, f.t1_ns, share)
    return encoded


def decode_forwards(encoded: tuple[int, ...], model: str, worker: int) -> list[Forward]:
    """Return forwards from the integers that `_encode_forwards` created."""
    forwards = []
    for at in range(0, len(encoded), FORWARD_FIELDS):
        role, batch, n_tokens, first, last, t0, t1, bits = encoded[at : at + FORWARD_FIELDS]
        layers, (share,) = (first, last), struct.unpack("=d", struct.pack("=q", bits))
        kind = model, ROLES[role], worker, batch
        forwards.append(Forward(*kind, n_tokens, layers, t0, t1, share=share))
    return forwards


def _describe_error(error: Exception) -> tuple[bool, str, str | None]:
    """Return three facts about an error: whether it is a `SpecbenchError`, its message and its
    hint.
    """
    if isinstance(error, SpecbenchError):
        return True, error.message, error.hint
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return False, to_one_line(f"{type(error).__name__}: {message_of(error)}{where}"), None
