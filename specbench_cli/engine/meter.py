"""Counts and times every forward: a decoder seen through a meter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from specbench_cli.engine.decoder import Decoder, State
from specbench_cli.engine.types import Forward, Input, Out, Role, Tokens


class HostClock:
    """Marks are nanoseconds of the monotonic clock: what a CPU, which works while we wait,
    needs."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Make now the zero of all marks."""
        self._zero = time.perf_counter_ns()

    def mark(self) -> int:
        """Nanoseconds since the zero."""
        return time.perf_counter_ns() - self._zero

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Marks already are times."""


class CudaClock:
    """Marks of forwards are CUDA events, so that a forward's time is the device's, not the
    launch's.

    `resolve` turns them into nanoseconds once the device is idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Wait for the device and make now the zero of all marks."""
        torch.cuda.synchronize(self._device)
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> int:
        """Index of a new event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        return len(self._events) - 1

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Replace event indices by nanoseconds since the zero."""
        torch.cuda.synchronize(self._device)
        for forward in forwards:
            forward.t0_ns = self._since_start(forward.t0_ns)
            forward.t1_ns = self._since_start(forward.t1_ns)

    def _since_start(self, index: int) -> int:
        return int(self._events[0].elapsed_time(self._events[index]) * 1e6)


class Meter:
    """The trace of one decoding: every forward in order."""

    def __init__(self, device: torch.device) -> None:
        self.clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self.forwards: list[Forward] = []

    def resolve(self) -> None:
        """Make all times nanoseconds; call once, after the decoding."""
        self.clock.resolve(self.forwards)


class Metered:
    """A decoder whose forwards are recorded. Everything else is the decoder's own.

    The first forward of a decoder that reads the text from its beginning is a prefill; others are
    of the given role, unless the caller says otherwise. (A head starts after the target's prefill.)
    """

    def __init__(self, decoder: Decoder, meter: Meter, *, role: Role) -> None:
        self.decoder = decoder
        self._meter = meter
        self._mark = meter.clock.mark
        self._role: Role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, x: Input, state: State, *, role: Role | None = None, **kwargs: Any) -> Out:
        """`Decoder.forward`, recorded."""
        rows = x.ids if isinstance(x, Tokens) else x.rows
        if role is None:
            role = self._role if state.length() or self.decoder.first else "prefill"
        t0 = self._mark()
        out = self.decoder.forward(x, state, **kwargs)
        t1 = self._mark()
        self._meter.forwards.append(
            Forward(
                model=self.decoder.name,
                role=role,
                worker=0,
                batch=rows.shape[0],
                n_tokens=rows.shape[1],
                layers=kwargs.get("layers") or (0, self.decoder.n_layers),
                t0_ns=t0,
                t1_ns=t1,
            )
        )
        return out
