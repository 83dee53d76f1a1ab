"""What a method with several workers would take if each had a device of its own.

Modelled, not measured: always labelled so, never ranked with measured rows. A record's trace is
replayed with full overlap:

1. A worker does what it did in the measured order: forwards, sending, reading.
2. A forward starts when its worker is free and has read what it had read before that forward; a
   message leaves when its sender has done what it did before, and arrives a latency later.
3. A forward takes the median of the same forward (model, tokens, layers, share) in the run's rows
   that have one worker, and so had the whole machine to themselves; one that none of them has takes
   what it took.
4. Host work is the worker's own: the median gap, measured, before its forwards and before its
   messages. The latency is the median of the messages whose reader did nothing but wait for them.

Decoding starts with all workers free and ends with the last forward whose result was used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from specbench_cli.report.numbers.pairing import loss
from specbench_cli.report.numbers.speedups import BASELINE
from specbench_cli.report.timeline.lanes import Arrow, Lanes, Span, lanes_of
from specbench_cli.store.schema import Record, Trace

TITLE = "Modelled, not measured"
NOTE = (
    "Decoding of methods with several workers as it would be with a device for each: traces"
    " replayed with full overlap, forwards as long as in the rows that had the whole machine to"
    " themselves (of others: as they were), host work and messages as measured."
    " The speedup is over vanilla's measured decoding. Never ranked with measured rows."
)
HEADINGS = (
    "method",
    "devices",
    "outputs",
    "modelled decode speedup",
    "per device",
    "modelled ms",
    "measured ms",
    "taken as they were",
)

Kind = tuple[str, int, tuple[int, int], float]
"""What decides how long a forward takes: model, tokens, layers, share of the weights."""


@dataclass(frozen=True, slots=True)
class ModelledRow:
    """The modelled decode time of a method, over the outputs that vanilla has too.

    devices: one a worker. outputs: how many. measured, modelled: decode times in ns, summed.
    speedup: vanilla's measured decode time, scaled to the method's tokens, over the modelled one.
    own: share of forwards that no row with one worker has, which take what they took.
    """

    label: str
    method: str
    devices: int
    outputs: int
    measured: int
    modelled: float
    speedup: float
    own: float

    @property
    def per_device(self) -> float:
        """Speedup per device."""
        return self.speedup / self.devices

    def cells(self) -> tuple[str, ...]:
        """What stands under `HEADINGS`."""
        return (
            self.label,
            str(self.devices),
            str(self.outputs),
            f"{self.speedup:.2f}x (modelled, {self.devices} devices)",
            f"{self.per_device:.2f}x",
            f"{self.modelled / 1e6:.1f}",
            f"{self.measured / 1e6:.1f}",
            f"{self.own:.0%} of forwards",
        )


@dataclass(frozen=True, slots=True)
class Host:
    """Work between forwards, in ns.

    forward, message: by worker, before each of its forwards and before each message that it sends.
    latency: from sending a message to its being read by a worker that waits for it.
    """

    forward: Mapping[int, float]
    message: Mapping[int, float]
    latency: float

    @classmethod
    def of(cls, lanes: Sequence[Lanes]) -> Host:
        """Medians over the decoding of some outputs."""
        forward, message = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        latencies = []
        for own in lanes:
            free: dict[int, int] = {}
            for at, worker, event in _events(own):
                before = free.get(worker)
                waited = not isinstance(event, Span) and event.sender != worker
                if before is not None and not waited:
                    gaps = forward if isinstance(event, Span) else message
                    gaps[worker].append(max(0, at - before))
                elif before is not None and isinstance(event, Arrow) and before <= event.sent:
                    latencies.append(max(0, event.read - event.sent))
                free[worker] = max(event.end if isinstance(event, Span) else at, before or 0)
        return cls(
            {worker: median(gaps) for worker, gaps in forward.items()},
            {worker: median(gaps) for worker, gaps in message.items()},
            median(latencies) if latencies else 0.0,
        )


NO_HOST = Host({}, {}, 0.0)
"""Nothing but forwards takes time."""


def modelled_rows(records: Iterable[Record]) -> list[ModelledRow]:
    """The rows of a run's methods that have several workers, in the order of the records; none
    where there is no such method or vanilla has no times."""
    plain: dict[tuple[str, int, int], Record] = {}
    parallel: dict[str, list[Record]] = {}
    serial = defaultdict[Kind, list[int]](list)
    for record in records:
        if loss(record) or record.forwards is None or not record.ns.decode:
            continue
        if record.label == BASELINE:
            plain[record.prompt_id, record.turn, record.pass_] = record
        if record.forwards.workers > 1:
            parallel.setdefault(record.label, []).append(record)
            continue
        for kind, took in _taken(record.forwards, record.ns.prefill or 0):
            serial[kind].append(took)
    known = {kind: median(times) for kind, times in serial.items()}
    rows = (_row(own, plain, known) for own in parallel.values())
    return [row for row in rows if row is not None]


def _taken(trace: Trace, prefill: int) -> Iterator[tuple[Kind, int]]:
    """What forwards after prefill took (`Lanes.decoding` without making lanes: runs have many)."""
    kinds = trace.kinds
    columns = zip(trace.kind, trace.n_tokens, trace.t0_ns, trace.t1_ns, strict=True)
    for index, n_tokens, start, end in columns:
        kind = kinds[index]
        if kind.role != "prefill" and start >= prefill:
            yield (kind.model, n_tokens * kind.batch, kind.layers, kind.share), end - start


def replay(lanes: Lanes, known: Mapping[Kind, float], host: Host) -> float:
    """The modelled decode time of an output, in ns.

    Args:
        known: how long forwards take; others take what they took.
    """
    free, sent, end = defaultdict[int, float](float), dict[int, float](), 0.0
    for _, worker, event in _events(lanes):
        if isinstance(event, Span):
            free[worker] += host.forward.get(worker, 0.0) + _duration(event, known)
            if event.used:
                end = max(end, free[worker])
        elif event.sender == worker:
            free[worker] += host.message.get(worker, 0.0)
            sent[id(event)] = free[worker]
        else:
            arrived = sent.get(id(event), -host.latency) + host.latency
            free[worker] = max(free[worker], arrived)
    return end


def _events(lanes: Lanes) -> list[tuple[int, int, Span | Arrow]]:
    """What happened in decoding, in the measured order: when, in which worker, and what. A message
    is there twice, sent and read."""
    found: list[tuple[int, int, int, Span | Arrow]] = []
    for span in lanes.decoding:
        found.append((span.start, 2, span.worker, span))
    for arrow in lanes.arrows:
        if arrow.sent >= lanes.prefill:
            found.append((arrow.sent, 0, arrow.sender, arrow))
        if arrow.read >= lanes.prefill:
            found.append((max(arrow.sent, arrow.read), 1, arrow.receiver, arrow))
    found.sort(key=lambda event: event[:2])
    return [(at, worker, event) for at, _, worker, event in found]


def _duration(span: Span, known: Mapping[Kind, float]) -> float:
    own = span.end - span.start
    expected = known.get(_kind(span), own)
    return expected if span.used else min(own, expected)  # a cancelled one may have stopped early


def _kind(span: Span) -> Kind:
    return span.model, span.n_tokens * span.batch, span.layers, span.share


def _row(
    records: Sequence[Record],
    plain: Mapping[tuple[str, int, int], Record],
    known: Mapping[Kind, float],
) -> ModelledRow | None:
    lanes = [lanes_of(record) for record in records]
    host = Host.of(lanes)
    vanilla = modelled = 0.0
    measured = outputs = 0
    for record, own in zip(records, lanes, strict=True):
        base = plain.get((record.prompt_id, record.turn, record.pass_))
        if base is None or base.worker != record.worker:
            continue  # of another device
        if not (base.ns.decode and base.n_tokens and record.n_tokens):
            continue
        if base.n_tokens > 1 and record.n_tokens > 1:
            vanilla += base.ns.decode * (record.n_tokens - 1) / (base.n_tokens - 1)
            modelled += replay(own, known, host)
            measured += record.ns.decode or 0
            outputs += 1
    if not modelled:
        return None
    spans = [span for own in lanes for span in own.decoding]
    return ModelledRow(
        label=records[0].label,
        method=records[0].method,
        devices=max(len(own.workers) for own in lanes),
        outputs=outputs,
        measured=measured,
        modelled=modelled,
        speedup=vanilla / modelled,
        own=sum(_kind(span) not in known for span in spans) / len(spans),
    )
