"""Modelled time of a method with several workers if each had its own device.

The times are modelled, not measured. Reports always label them as modelled, and never rank them
with measured times. A record's trace is replayed with full overlap:

1. A worker repeats its forwards, sends and reads in the measured order.
2. A forward starts when its worker is free and has read the same messages as before. A message
   leaves when its sender has finished its earlier work, and arrives one latency later.
3. A forward takes the median time of the same forward (model, tokens, layers, share) in the run's
   methods with one worker, which had the whole machine. If they have no such forward, it takes its
   measured time.
4. Host work is per worker: the median measured gap before its forwards and before its messages. The
   latency is the median over messages whose reader was only waiting for them.

Decoding starts with all workers free and ends with the last forward whose result was used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from specbench_cli.predict.replay import HostGaps, RecordedForward, RecordedForwards, replay
from specbench_cli.store.schema import BASELINE, Record, Trace
from specbench_cli.summary.columns import Column
from specbench_cli.summary.formats import number, percent, ratio

TITLE = "Modelled, not measured"
NOTE = (
    "Decoding of methods with several workers as it would be with a device for each: traces"
    " replayed with full overlap, forwards as long as in the rows that had the whole machine to"
    " themselves (others: as measured), host work and messages as measured."
    " The speedup is over vanilla's measured decoding. Never ranked with measured rows."
)
Kind = tuple[str, int, tuple[int, int], float]
"""Forwards with equal (model, tokens, layers, share of the weights) take about equally long."""


@dataclass(frozen=True, slots=True)
class ModelledRow:
    """Modelled decode time of a method with several workers.

    All numbers are over the outputs that vanilla has, too.

    devices: number of devices, one per worker.
    outputs: number of outputs.
    measured, modelled: sum of decode times in ns.
    speedup: vanilla's measured decode time, scaled to the method's tokens, divided by `modelled`.
    own: share of the forwards whose kind occurs in no method with one worker. Their measured time
        is used.
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


COLUMNS: tuple[Column[ModelledRow], ...] = (
    Column("method", align="l", format=lambda row: row.label),
    Column("devices", format=lambda row: str(row.devices)),
    Column("outputs", format=lambda row: str(row.outputs)),
    Column(
        "modelled decode speedup",
        format=lambda row: f"{ratio(row.speedup)} (modelled, {row.devices} devices)",
    ),
    Column("per device", format=lambda row: ratio(row.per_device)),
    Column("modelled ms", format=lambda row: number(row.modelled / 1e6, 1)),
    Column("measured ms", format=lambda row: number(row.measured / 1e6, 1)),
    Column("taken as they were", format=lambda row: f"{percent(row.own)} of forwards"),
)


@dataclass(frozen=True, slots=True)
class MedianCosts:
    """Cost function: returns the median time of a kind of forward.

    If the kind has no median, it returns the measured time of the forward.

    medians: median time in ns of each kind, in methods with one worker.
    """

    medians: Mapping[Kind, float]

    def __call__(self, forward: RecordedForward) -> float:
        """Return the time of a forward in ns."""
        took = forward.end - forward.start
        expected = self.medians.get(_kind(forward), took)
        return (
            expected if forward.used else min(took, expected)
        )  # a cancelled forward may have stopped early


def median_gaps(recordings: Iterable[RecordedForwards]) -> HostGaps:
    """Return the median host work before forwards and messages, and the median message latency."""
    forward, message = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    latencies = []
    for recording in recordings:
        free: dict[int, int] = {}
        for at, _, worker, what in recording.events():
            end, before = at, free.get(worker)
            if isinstance(what, RecordedForward):
                end, gaps = what.end, forward
            elif what.sender == worker:
                gaps = message
            else:
                gaps = None
                if (
                    before is not None and before <= what.sent
                ):  # the worker was waiting for this message
                    latencies.append(max(0, what.read - what.sent))
            if before is not None and gaps is not None:
                gaps[worker].append(max(0, at - before))
            free[worker] = max(end, before or 0)
    return HostGaps(
        {worker: median(gaps) for worker, gaps in forward.items()},
        {worker: median(gaps) for worker, gaps in message.items()},
        median(latencies) if latencies else 0.0,
    )


def modelled_rows(records: Iterable[Record]) -> list[ModelledRow]:
    """Return the modelled results of a run's methods with several workers, in recorded order.

    The list is empty if there is no such method, or if vanilla has no times.
    """
    plain: dict[tuple[str, int, int], Record] = {}
    parallel: dict[str, list[Record]] = {}
    serial = defaultdict[Kind, list[int]](list)
    for record in records:
        if record.error is not None or record.void or not record.ns.decode:
            continue
        if record.forwards is None:
            continue
        if record.label == BASELINE:
            plain[record.prompt_id, record.turn, record.pass_] = record
        if record.forwards.workers > 1:
            parallel.setdefault(record.label, []).append(record)
            continue
        for kind, took in _forward_durations(record.forwards, record.ns.prefill or 0):
            serial[kind].append(took)
    costs = MedianCosts({kind: median(times) for kind, times in serial.items()})
    rows = (_row(own, plain, costs) for own in parallel.values())
    return [row for row in rows if row is not None]


def _forward_durations(trace: Trace, prefill: int) -> Iterator[tuple[Kind, int]]:
    """Yield the kind and duration in ns of each forward after prefill.

    The function reads the columns of the trace directly, because constructing `RecordedForwards`
    for a whole run is slow.
    """
    kinds = trace.kinds
    columns = zip(trace.kind, trace.n_tokens, trace.t0_ns, trace.t1_ns, strict=True)
    for index, n_tokens, start, end in columns:
        kind = kinds[index]
        if kind.role != "prefill" and start >= prefill:
            yield (kind.model, n_tokens * kind.batch, kind.layers, kind.share), end - start


def _kind(forward: RecordedForward) -> Kind:
    return forward.model, forward.rows[0].new, forward.layers, forward.share


def _row(
    records: Sequence[Record],
    plain: Mapping[tuple[str, int, int], Record],
    costs: MedianCosts,
) -> ModelledRow | None:
    traces = [record.forwards or Trace() for record in records]
    recordings = [
        RecordedForwards.from_trace(trace, since=record.ns.prefill or 0)
        for trace, record in zip(traces, records, strict=True)
    ]
    gaps = median_gaps(recordings)
    vanilla = modelled = 0.0
    measured = outputs = 0
    for record, recording in zip(records, recordings, strict=True):
        base = plain.get((record.prompt_id, record.turn, record.pass_))
        if base is None or base.worker != record.worker:
            continue  # measured on another device
        if not (base.ns.decode and base.n_tokens and record.n_tokens):
            continue
        if base.n_tokens > 1 and record.n_tokens > 1:
            vanilla += base.ns.decode * (record.n_tokens - 1) / (base.n_tokens - 1)
            modelled += replay(recording, costs, gaps).last_used
            measured += record.ns.decode or 0
            outputs += 1
    if not modelled:
        return None
    forwards = [forward for recording in recordings for forward in recording.decoding]
    return ModelledRow(
        label=records[0].label,
        method=records[0].method,
        devices=max(trace.workers for trace in traces),
        outputs=outputs,
        measured=measured,
        modelled=modelled,
        speedup=vanilla / modelled,
        own=sum(_kind(each) not in costs.medians for each in forwards) / len(forwards),
    )
