"""Timeline of the forwards of one output, with one lane per worker, for the timeline figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from specbench_cli.predict.replay import RecordedForward, RecordedForwards, RecordedMessage
from specbench_cli.store.schema import Record, Trace


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step, from the end of the previous step (or prefill) to the end of its verification."""

    start: int
    end: int
    drafted: int
    tested: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class WorkerLanes:
    """Timeline of an output. It is empty if the method reports no forwards.

    prefill: start of decoding, in ns from the start of the timer.
    spans: forwards, sorted by start.
    arrows: messages between workers.
    steps: steps; empty if the method reports none.
    learn: duration of learning before the start of the timer, in ns.
    """

    label: str
    prompt_id: str
    turn: int
    pass_: int
    prefill: int
    spans: tuple[RecordedForward, ...]
    arrows: tuple[RecordedMessage, ...] = ()
    steps: tuple[StepSpan, ...] = field(default=())
    learn: int = 0

    @cached_property
    def workers(self) -> dict[int, str]:
        """Worker -> names of the models that it ran."""
        found: dict[int, list[str]] = {}
        for span in self.spans:
            found.setdefault(span.worker, []).append(span.model)
        return {worker: " + ".join(dict.fromkeys(found[worker])) for worker in sorted(found)}

    @cached_property
    def decoding(self) -> tuple[RecordedForward, ...]:
        """Forwards after the prefill."""
        return tuple(
            span for span in self.spans if span.role != "prefill" and span.start >= self.prefill
        )


def make_lanes(record: Record) -> WorkerLanes:
    """Return the timeline of the output of a record."""
    recording = RecordedForwards.from_trace(record.forwards or Trace())
    spans = sorted(recording.forwards, key=lambda span: (span.start, span.worker))
    prefill = record.ns.prefill
    if prefill is None:  # a noisy record may have a trace but no times
        prefill = max((span.end for span in spans if span.role == "prefill"), default=0)
    return WorkerLanes(
        label=record.label,
        prompt_id=record.prompt_id,
        turn=record.turn,
        pass_=record.pass_,
        prefill=prefill,
        spans=tuple(spans),
        arrows=recording.messages,
        steps=tuple(_steps(record, spans, prefill)),
        learn=record.ns.learn or 0,
    )


def _steps(record: Record, spans: list[RecordedForward], prefill: int) -> list[StepSpan]:
    """Return the steps of an output. Each step ends with the end of a verification.

    If there are more verifications than steps, they are distributed evenly over the steps. If there
    are fewer, the list is empty.
    """
    if record.steps is None:
        return []
    steps = record.steps
    last = max((span.layers[1] for span in spans if span.role == "verify"), default=0)
    ends = [s.end for s in spans if s.role == "verify" and s.used and s.layers[1] == last]
    count = len(steps.committed)
    if not count or len(ends) < count:
        return []
    found, start = [], prefill
    for place, counters in enumerate(
        zip(steps.levels, steps.tested, steps.accepted, steps.committed, strict=True), start=1
    ):
        end = ends[place * len(ends) // count - 1]
        found.append(StepSpan(start, end, *counters))
        start = end
    return found
