"""Meters, which record and time all forwards of the models, and the clocks that meters use."""

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
from specbench_cli.former_names import current_options, renamed_members


class HostClock:
    """Clock of a CPU. On a CPU, a forward has ended when its call returns.

    A mark is a point in time, in ns after the start of the timer.

    Attributes:
        zero_ns: Start of the timer, in ns of the monotonic clock.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the timer again from 0."""
        self.zero_ns = self.now_ns()

    def now_ns(self) -> int:
        """Return the time of the monotonic clock in ns."""
        return time.perf_counter_ns()

    def sleep(self, ns: int) -> None:
        """Wait for `ns` nanoseconds, and keep the CPU cores busy meanwhile.

        Idle cores save power and are slower at first. On one machine, the forwards of a whole short
        request then took a third longer. This must not count as a cost of the method.
        """
        due = self.now_ns() + ns
        matrix = torch.ones(256, 256)
        while due - self.now_ns() > 1_000_000:
            torch.mm(matrix, matrix)
        while self.now_ns() < due:
            pass

    def mark(self) -> int:
        """Return the current mark: the ns since the start of the timer."""
        return self.now_ns() - self.zero_ns

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Do nothing: marks of this clock are already times in ns."""


class CudaClock(HostClock):
    """Clock that measures device time with CUDA events. The time to launch kernels does not count.

    A mark is the index of an event. `resolve` waits for the current CUDA stream and converts marks
    to ns.

    Attributes:
        zero_ns: Start of the timer, in ns of the monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Wait for the CUDA stream, then start the timer again from 0."""
        torch.cuda.current_stream(self._device).synchronize()
        self._events: list[torch.cuda.Event] = []
        self.mark()
        self.zero_ns = self.now_ns()

    def mark(self) -> int:
        """Record an event on the current CUDA stream. Return the index of the event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        return len(self._events) - 1

    def resolve(self, forwards: Sequence[Forward]) -> None:
        """Replace the event indices of forwards by times in ns since the start of the timer."""
        torch.cuda.current_stream(self._device).synchronize()
        for forward in forwards:
            forward.t0_ns = self._since_start(forward.t0_ns)
            forward.t1_ns = self._since_start(forward.t1_ns)
        del self._events[1:]

    def _since_start(self, index: int) -> int:
        return int(self._events[0].elapsed_time(self._events[index]) * 1e6)


def not_finite_message(model: str) -> str:
    """Return the error message for a model with NaN or infinite logits."""
    return f"the logits of {model} are not finite"


class Meter:
    """Trace of the forwards and messages while one request, or one batch, is decoded.

    Args:
        clock: Clock for the times. None uses the device's clock.

    Attributes:
        forwards: All forwards, in the order in which this worker recorded or received them.
        messages: Messages between workers.
    """

    def __init__(self, device: torch.device, clock: HostClock | None = None) -> None:
        self.clock = clock or (CudaClock(device) if device.type == "cuda" else HostClock())
        self.forwards: list[Forward] = []
        self.messages: list[SentMessage] = []
        self._unresolved: list[Forward] = []  # forwards whose times are still marks of the clock
        self._last_logits: dict[tuple[int, str], Tensor] = {}

    def record(self, forward: Forward) -> None:
        """Record a forward. Its times must be marks of this meter's clock."""
        self.forwards.append(forward)
        self._unresolved.append(forward)

    def record_logits(self, name: str, place: int | None, logits: Tensor) -> None:
        """Store the latest logits of a draft model. At the end of a step, the engine checks that
        they are finite.

        NaN stays in a model's state. So NaN in earlier logits of the step also appears in the
        latest logits.

        Args:
            place: Index of the sequence in its batch. A sequence that is decoded alone has None,
                which means 0.
        """
        if logits.numel():
            self._last_logits[place or 0, name] = logits

    def pop_largest_logits(self, place: int | None = None) -> dict[str, Tensor]:
        """Return the maximum [1] of each draft model's latest logits, and delete the stored logits.

        If any of the logits is NaN or positive infinity, the maximum is not finite.
        """
        mine = [(at, name) for at, name in self._last_logits if at == (place or 0)]
        return {key[1]: self._last_logits.pop(key).amax().reshape(1) for key in mine}

    def merge(self, forwards: Sequence[Forward], *, used: bool = True) -> None:
        """Record forwards of another worker.

        Args:
            forwards: Forwards with times in ns of the monotonic clock. The function changes them in
                place.
            used: False if the results of the forwards were discarded.
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
        """Record a message between workers. Its times are in ns of the monotonic clock."""
        zero = self.clock.zero_ns
        self.messages.append(SentMessage(sender, receiver, t0_ns - zero, t1_ns - zero, nbytes))

    def take(self) -> list[Forward]:
        """Return the forwards so far, with times in ns of the monotonic clock, and delete them
        here.

        Raises:
            ArithmeticError: The logits of a draft model are not finite. This is checked only on a
                CPU.
        """
        self.resolve()
        for name, greatest in self.pop_largest_logits().items():
            # Checking here on a GPU would add one sync per step.
            if greatest.device.type == "cpu" and not math.isfinite(host.number(greatest)):
                raise ArithmeticError(not_finite_message(name))
        zero, taken, self.forwards = self.clock.zero_ns, self.forwards, []
        for forward in taken:
            forward.t0_ns += zero
            forward.t1_ns += zero
        return taken

    def resolve(self) -> None:
        """Convert all times of the trace to ns since the start of the timer. Waits
        for the device."""
        self.clock.resolve(self._unresolved)
        self._unresolved.clear()


@renamed_members(exits_of="record_exits", exits="exit_logits", remember="append_kv")
class Metered:
    """Wrapper of a decoder that records its forwards. All other attributes are the decoder's.

    A forward on an empty state is recorded as a prefill. Heads are an exception, because they start
    after the target's prefill. Any other forward is recorded with `role`, unless the caller passes
    another role.

    Args:
        role: Role of forwards after the prefill.
        place: Index of the sequence in its batch. None for a sequence that is decoded alone.

    Attributes:
        portion: Share of the decoder's weights that its forwards read (`Decoder.share`).
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
        """Run `Decoder.forward` and record it.

        Args:
            role, early: Arguments of `execute`.
            options: Further arguments of `Decoder.forward`.
        """
        if "taps" in options:
            options = current_options(options)
        return self.execute(ModelInput(x, state, **options), role=role, early=early)

    def execute(
        self, model_input: ModelInput, *, role: Role | None = None, early: bool = False
    ) -> ModelOutput:
        """Run a forward and record it.

        Args:
            role: Purpose of the forward. None means "prefill" on an empty state, otherwise the role
                of this object.
            early: Whether to compute logits from the last layer that runs, even if the model has
                more layers.
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

    def exit_logits(self, rows: Tensor) -> Tensor:
        """Run `Decoder.exit_logits`, and record it as an auxiliary forward that runs no layer.

        Each row counts as one token.
        """
        return self.record_exits(rows)[0]

    def record_exits(self, rows: Tensor) -> tuple[Tensor, Forward]:
        """Run `exit_logits`. Return the logits and the recorded forward."""
        t0 = self._mark()
        logits = self.decoder.exit_logits(rows)
        share = self._share((0, 0), frozenset(), True)
        return logits, self._record_auxiliary(t0, rows.shape[:-1].numel(), (0, 0), share)

    def append_kv(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """Run `Decoder.append_kv` and record it as an auxiliary forward."""
        t0 = self._mark()
        self.decoder.append_kv(rows, state, layers, positions)
        share = self.decoder.append_kv_share(layers)
        self._record_auxiliary(t0, rows.shape[1], (layers.start, layers.stop), share)

    def _record_auxiliary(self, t0: int, n: int, layers: tuple[int, int], share: float) -> Forward:
        """Record and return an auxiliary forward over n tokens that began at `t0` and ends now."""
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
        """Return logits from a layer's output [b, n, hidden], as if the layer were the last one."""
        if at is None:
            return None
        if isinstance(at, Tensor):
            rows = rows.index_select(1, at)
        elif at == "last":
            rows = rows[:, -1:]
        return self.decoder.unembed(self.decoder.norm(rows))

    def _share(self, layers: tuple[int, int] | None, skip: Skip, logits: bool) -> float:
        """Return the share of the weights that a forward reads. The result is cached."""
        if layers is None and not skip and logits:
            return 1.0
        kind = layers, skip, logits
        if kind not in self._shares:
            self._shares[kind] = self.decoder.share(*kind)
        return self._shares[kind]

    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run `Decoder.forward_batch` and record it as one forward.

        It counts as a prefill if all parts belong to prompts, or if all states are empty.
        """
        begun = [self.decoder.first or part.state.length() for part in parts]
        rows = {part.place: part.shape[1] for part in parts}
        for part, before in zip(parts, begun, strict=True):
            if not before:
                rows[part.place] += self.decoder.extra_tokens(part.state)
        reading = frozenset(part.place for part in parts if part.prompt)
        prefill = not any(begun) or len(reading) == len(parts)
        t0 = self._mark()
        outs = self.decoder.forward_batch(parts, captured_layers=captured_layers)
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
    """Wrapper of a stateless head that records its forwards. All other attributes are the head's.

    Args:
        place: Index of the sequence in its batch. None for a sequence that is decoded alone.
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
        """Run `FeatureHead.forward` and record it."""
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
