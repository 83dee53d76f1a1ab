"""Pairs of times of a method and of vanilla, for the same prompt, turn and repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specbench_cli.stats.bootstrap import PairedTimes
from specbench_cli.store.schema import LOAD_PASS_OFFSET, Record

Measure = Callable[[Record], tuple[int | None, int | None]]
"""Function that returns the time of a record in ns, and the number of tokens decoded in that time.

Values that the method does not report are None.
"""

UntimedReason = Literal["noisy", "failed"]


def total_time(record: Record) -> tuple[int | None, int | None]:
    """Return the wall time of an output and its number of tokens."""
    return record.ns.total, record.n_tokens


def decode_time(record: Record) -> tuple[int | None, int | None]:
    """Return the decode time (after prefill) of an output, and its tokens committed in
    this time.
    """
    return record.ns.decode, None if record.n_tokens is None else record.n_tokens - 1


@dataclass(frozen=True, slots=True)
class PairedRecords:
    """Paired times of several methods and of their baseline.

    labels: Labels of the methods with at least one pair, in the order of `times`.
    """

    labels: tuple[str, ...]
    times: PairedTimes

    def ratios(self) -> dict[str, float]:
        """Return label -> point estimate of the speedup."""
        x, y = self.times.baseline.sum((1, 2)), self.times.method.sum((1, 2))
        return dict(zip(self.labels, (x / y).tolist(), strict=True))


def pair_times(
    baseline: Iterable[Record], records_by_label: Mapping[str, Sequence[Record]], measure: Measure
) -> PairedRecords:
    """Pair the times of every method with those of the baseline.

    The time of the baseline is scaled to the method's number of tokens. This changes nothing if the
    outputs are identical. Outputs of two workers are never paired, since workers are on different
    devices.
    """
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in baseline}
    processes = _index(process_number(key[2]) for key in reference)
    clusters = _index((r.task, r.cluster) for r in reference.values())
    families = _index(r.family for r in reference.values())
    strata = np.zeros(len(clusters), dtype=np.int64)
    for r in reference.values():
        strata[clusters[r.task, r.cluster]] = families[r.family]

    x = np.zeros((len(records_by_label), len(processes), len(clusters)))
    y = np.zeros_like(x)
    for row, own in enumerate(records_by_label.values()):
        for r in own:
            base = reference.get((r.prompt_id, r.turn, r.pass_))
            if base is None or untimed_reason(base) or untimed_reason(r) or base.worker != r.worker:
                continue
            (v, n_v), (m, n_m) = measure(base), measure(r)
            if v and n_v and m and n_m:
                at = row, processes[process_number(r.pass_)], clusters[r.task, r.cluster]
                x[at] += v * n_m / n_v
                y[at] += m
    paired = y.sum((1, 2)) > 0
    labels = tuple(label for label, has in zip(records_by_label, paired, strict=True) if has)
    return PairedRecords(labels, PairedTimes(x[paired], y[paired], strata))


def process_number(pass_: int) -> int:
    """Return the number of the process that measured a repeat.

    The index of a repeat also encodes its load and, if several runs are combined (`together`), its
    run.
    """
    return pass_ % LOAD_PASS_OFFSET


def untimed_reason(record: Record) -> UntimedReason | None:
    """Return why the time of a record is not trusted, or None if it is."""
    if record.error is not None:
        return "failed"
    return "noisy" if record.void else None


def _index(keys: Iterable[Any]) -> dict[Any, int]:
    """Return key -> index in sorted order. So the order of the records has no influence."""
    return {key: place for place, key in enumerate(sorted(set(keys)))}
