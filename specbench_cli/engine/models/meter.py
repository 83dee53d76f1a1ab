"""Counts and times every forward: a decoder seen through a meter."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, ModelInput, State
from specbench_cli.engine.models.head import FeatureHead, LevelOutput
from specbench_cli.engine.types import Forward, Input, ModelOutput, Role, SentMessage, Skip
from specbench_cli.former_names import renamed_members


class HostClock:
    """Marks are nanoseconds of the monotonic clock: what a CPU, which works while we wait,
    needs.

    Attributes:
        zero_ns: the zero of all marks, in nanoseconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Make now the zero of all marks."""
        self.zero_ns = self.now()

    def now(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.perf_counter_ns()

    def sleep(self, ns: int) -> None:
        """Wait for so long, at work that nobody reads.

        Cores that slept are slower for the whole of a short request: on the machine where it was
        seen a forward took a third longer, which says what the system's power saving costs and is
        none of a method's time.
        """
        due = self.now() + ns
        matrix = torch.ones(256, 256)
        while due - self.now() > 1_000_000:
            torch.mm(matrix, matrix)
        while self.now() < due:
            pass

    def mark(self) -> int:
        """Nanoseconds since the zero."""
        return self.now() - self.zero_ns

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Marks already are times."""


class CudaClock(HostClock):
    """Marks of forwards are CUDA events, so that a forward's time is the device's, not the
    launch's.

    `resolve` turns them into nanoseconds once the stream is idle: other streams may go on.

    Attributes:
        zero_ns: the zero of all marks, in nanoseconds of the monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Wait for the stream and make now the zero of all marks."""
        torch.cuda.current_stream(self._device).synchronize()
        self._events: list[torch.cuda.Event] = []
        self.mark()
        self.zero_ns = self.now()

    def mark(self) -> int:
        """Index of a new event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        return len(self._events) - 1

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Replace event indices by nanoseconds since the zero."""
        torch.cuda.current_stream(self._device).synchronize()
        for forward in forwards:
            forward.t0_ns = self._since_start(forward.t0_ns)
            forward.t1_ns = self._since_start(forward.t1_ns)
        del self._events[1:]

    def _since_start(self, index: int) -> int:
        return int(self._events[0].elapsed_time(self._events[index]) * 1e6)


def not_finite_message(model: str) -> str:
    """What is said of a model whose logits are not all numbers."""
    return f"the logits of {model} are not finite"


class Meter:
    """The trace of one decoding.

    Args:
        clock: what its times are of; default: the device's.

    Attributes:
        forwards: every forward, in the order in which this worker heard of them.
        messages: what went from worker to worker.
    """

    def __init__(self, device: torch.device, clock: HostClock | None = None) -> None:
        self.clock = clock or (CudaClock(device) if device.type == "cuda" else HostClock())
        self.forwards: list[Forward] = []
        self.messages: list[SentMessage] = []
        self._unresolved: list[Forward] = []  # those whose times are marks of this clock
        self._last_logits: dict[tuple[int, str], Tensor] = {}

    def record(self, forward: Forward) -> None:
        """Keep a forward whose times are marks of this meter's clock."""
        self.forwards.append(forward)
        self._unresolved.append(forward)

    def record_logits(self, name: str, place: int | None, logits: Tensor) -> None:
        """Keep what a draft model said last: what is no number there stays in its state, so that
        the last logits of a step tell of all before them.

        Args:
            place: Index of the sequence in its batch. None means 0: a sequence that is decoded
                alone is the first of its batch.
        """
        if logits.numel():
            self._last_logits[place or 0, name] = logits

    def pop_largest_logits(self, place: int | None = None) -> dict[str, Tensor]:
        """The greatest of each draft model's last logits, [1]; they are then forgotten. No finite
        number wherever one of them is not a number, or positively infinite."""
        mine = [(at, name) for at, name in self._last_logits if at == (place or 0)]
        return {key[1]: self._last_logits.pop(key).amax().reshape(1) for key in mine}

    def merge(self, forwards: Sequence[Forward], *, used: bool = True) -> None:
        """Keep forwards of another worker.

        Args:
            forwards: with times in nanoseconds of the monotonic clock; changed in place.
            used: whether their results are of use.
        """
        zero = self.clock.zero_ns
        for forward in forwards:
            forward.t0_ns -= zero
            forward.t1_ns -= zero
            forward.used &= used
        self.forwards.extend(forwards)

    def record_message(
        self, sender: int, receiver: int, t0_ns: int, t1_ns: int, nbytes: int
    ) -> None:
        """Keep a message, its times in nanoseconds of the monotonic clock; see `Sent`."""
        zero = self.clock.zero_ns
        self.messages.append(SentMessage(sender, receiver, t0_ns - zero, t1_ns - zero, nbytes))

    def take(self) -> list[Forward]:
        """The forwards so far, which are then forgotten; times in nanoseconds of the monotonic
        clock.

        Raises:
            ArithmeticError: a draft model's logits are not finite; on a CPU alone.
        """
        self.resolve()
        for name, greatest in self.pop_largest_logits().items():
            # Off the CPU to look would be to wait, once more in every step.
            if greatest.device.type == "cpu" and not math.isfinite(host.number(greatest)):
                raise ArithmeticError(not_finite_message(name))
        zero, taken, self.forwards = self.clock.zero_ns, self.forwards, []
        for forward in taken:
            forward.t0_ns += zero
            forward.t1_ns += zero
        return taken

    def resolve(self) -> None:
        """Make all times nanoseconds since the zero; waits for the device."""
        self.clock.resolve(self._unresolved)
        self._unresolved.clear()


@renamed_members(exits_of="record_exits")
class Metered:
    """A decoder whose forwards are recorded. Everything else is the decoder's own.

    Attributes:
        portion: how much of the decoder's weights its forwards read (`Decoder.share`).

    The first forward of a decoder that reads the text from its beginning is a prefill; others are
    of the given role, unless the caller says otherwise. (A head starts after the target's prefill.)

    Args:
        place: of the sequence that the forwards are for, among those decoded together; None for one
            that is decoded alone.
    """

    portion: float = 1.0

    def __init__(
        self,
        decoder: Decoder,
        meter: Meter,
        *,
        role: Role,
        worker: int = 0,
        place: int | None = None,
    ) -> None:
        self.decoder = decoder
        self._worker = worker
        self._place = place
        self._meter = meter
        self._mark = meter.clock.mark
        self._role: Role = role
        self._shares: dict[tuple[tuple[int, int] | None, Skip, bool], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(
        self,
        x: Input,
        state: State,
        *,
        role: Role | None = None,
        early: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Run `Decoder.forward` and record it. The keyword arguments are those of `execute`."""
        return self.execute(ModelInput(x, state, **options), role=role, early=early)

    def execute(
        self, model_input: ModelInput, *, role: Role | None = None, early: bool = False
    ) -> ModelOutput:
        """Run a forward and record it.

        Args:
            role: Purpose of the forward. None means prefill, or the meter's role after it.
            early: Compute the logits of `logits_at` from the last layer that runs, even if the
                model has more.
        """
        state, (batch, n) = model_input.state, model_input.shape
        if role is None:
            role = self._role if state.length() or self.decoder.first else "prefill"
        extra_tokens = self.decoder.extra_tokens(state) if role == "prefill" else 0
        t0 = self._mark()
        out = self.decoder.run(model_input)
        if early:
            out = replace(out, logits=self._early_logits(out.hidden, model_input.logits_at))
        t1 = self._mark()
        if self._role == "draft" and out.logits is not None:
            self._meter.record_logits(self.decoder.name, self._place, out.logits)
        self._meter.record(
            Forward(
                model=self.decoder.name,
                role=role,
                worker=self._worker,
                batch=batch,
                n_tokens=n + extra_tokens,
                layers=model_input.layers or (0, self.decoder.n_layers),
                t0_ns=t0,
                t1_ns=t1,
                share=self._share(model_input.layers, model_input.skip, out.logits is not None),
                rows=None if self._place is None else {self._place: n},
            )
        )
        return out

    def exits(self, rows: Tensor) -> Tensor:
        """`Decoder.exits`, recorded as an auxiliary forward of so many tokens as there are rows
        that reads the output matrix alone."""
        return self.record_exits(rows)[0]

    def record_exits(self, rows: Tensor) -> tuple[Tensor, Forward]:
        """As `exits`, with the record of it."""
        t0 = self._mark()
        logits = self.decoder.exits(rows)
        share = self._share((0, 0), frozenset(), True)
        return logits, self._record_auxiliary(t0, rows.shape[:-1].numel(), (0, 0), share)

    def remember(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """`Decoder.remember`, recorded as an auxiliary forward."""
        t0 = self._mark()
        self.decoder.remember(rows, state, layers, positions)
        share = self.decoder.append_kv_share(layers)
        self._record_auxiliary(t0, rows.shape[1], (layers.start, layers.stop), share)

    def _record_auxiliary(self, t0: int, n: int, layers: tuple[int, int], share: float) -> Forward:
        """The record of an auxiliary forward over n tokens that began at t0 and ends now."""
        forward = Forward(
            model=self.decoder.name,
            role="aux",
            worker=self._worker,
            batch=1,
            n_tokens=n,
            layers=layers,
            t0_ns=t0,
            t1_ns=self._mark(),
            share=share,
            rows=None if self._place is None else {self._place: n},
        )
        self._meter.record(forward)
        return forward

    def _early_logits(self, rows: Tensor, at: LogitsAt) -> Tensor | None:
        """Logits of rows [b, n, hidden] that leave a layer."""
        if at is None:
            return None
        if isinstance(at, Tensor):
            rows = rows.index_select(1, at)
        elif at == "last":
            rows = rows[:, -1:]
        return self.decoder.unembed(self.decoder.norm(rows))

    def _share(self, layers: tuple[int, int] | None, skip: Skip, logits: bool) -> float:
        """See `Decoder.share`; worked out once for each kind of forward."""
        if layers is None and not skip and logits:
            return 1.0
        kind = layers, skip, logits
        if kind not in self._shares:
            self._shares[kind] = self.decoder.share(*kind)
        return self._shares[kind]

    def forward_batch(
        self, parts: Sequence[ModelInput], *, taps: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """`Decoder.forward_batch`, recorded as one forward: a prefill if all parts are of prompts,
        or begin their texts."""
        begun = [self.decoder.first or part.state.length() for part in parts]
        rows = {part.place: part.shape[1] for part in parts}
        for part, before in zip(parts, begun, strict=True):
            if not before:
                rows[part.place] += self.decoder.extra_tokens(part.state)
        reading = frozenset(part.place for part in parts if part.prompt)
        prefill = not any(begun) or len(reading) == len(parts)
        t0 = self._mark()
        outs = self.decoder.forward_batch(parts, taps=taps)
        t1 = self._mark()
        if self._role == "draft":
            for part, out in zip(parts, outs, strict=True):
                if out.logits is not None:
                    self._meter.record_logits(self.decoder.name, part.place, out.logits)
        self._meter.record(
            Forward(
                model=self.decoder.name,
                role="prefill" if prefill else self._role,
                worker=self._worker,
                batch=len(parts),
                n_tokens=sum(rows.values()),
                layers=(0, self.decoder.n_layers),
                t0_ns=t0,
                t1_ns=t1,
                share=self._share(None, frozenset(), any(out.logits is not None for out in outs)),
                rows=rows,
                prompt_places=frozenset() if prefill else reading,
            )
        )
        return outs


class MeteredHead:
    """A head without a state whose every forward is recorded. Everything else is the head's own.

    Args:
        place: see `Metered`.
    """

    portion: float = 1.0

    def __init__(
        self, head: FeatureHead, meter: Meter, *, role: Role = "draft", place: int | None = None
    ) -> None:
        self.head = head
        self._meter = meter
        self._role: Role = role
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, *more: Any, **named: Any) -> Any:
        """`FeatureHead.forward`, recorded."""
        mark = self._meter.clock.mark
        t0 = mark()
        out = self.head(rows, *more, **named)
        t1 = mark()
        logits = out.logits if isinstance(out, LevelOutput) else out
        if isinstance(logits, Tensor):
            self._meter.record_logits(self.head.name, self._place, logits)
        n = len(rows)
        self._meter.record(
            Forward(
                model=self.head.name,
                role=self._role,
                worker=0,
                batch=1,
                n_tokens=n,
                layers=(0, self.head.n_layers),
                t0_ns=t0,
                t1_ns=t1,
                rows=None if self._place is None else {self._place: n},
            )
        )
        return out

    forward = __call__
