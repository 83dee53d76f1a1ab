"""Speedups of methods with their intervals and significance groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench_cli.stats.bootstrap import (
    BootstrapResult,
    RareQuestions,
    estimate_speedups,
    find_rare_questions,
    resample,
)
from specbench_cli.stats.simultaneous import find_different_pairs, group_letters
from specbench_cli.store.record_queries import drop_prompt_errors
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.summary.pairing import Measure, PairedRecords, pair_times, untimed_reason

MAX_UNTIMED = 0.1
"""Maximum share of a method's outputs without a trusted time. With more, it has no speedup."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup of a method over its baseline, with a 95% interval.

    note: Reason why the ratio or the interval is missing.
    rare: Outlier questions that decide the speedup, if there are any.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None
    rare: RareQuestions | None = None


@dataclass(frozen=True, slots=True)
class Speedups:
    """Speedups of all methods.

    by_label: Label -> speedup. A missing speedup has a note with the reason.
    labels: Labels of the methods with at least one pair of times.
    drawn: Bootstrap resamples of the methods in `labels`. None if there are none.
    """

    by_label: dict[str, Speedup]
    labels: tuple[str, ...]
    drawn: BootstrapResult | None

    def group_letters(self, ranked: Sequence[str]) -> dict[str, str]:
        """Return label -> letters of the significance groups.

        Args:
            ranked: Labels to compare with each other. Each must have a speedup.
        """
        if self.drawn is None:
            return {}
        best_first = sorted(ranked, key=lambda label: -(self.by_label[label].ratio or 0.0))
        methods = [self.labels.index(label) for label in best_first]
        letters = group_letters(
            find_different_pairs(self.drawn, methods=methods), range(len(best_first))
        )
        return dict(zip(best_first, letters, strict=True))


def compute_speedups(
    records_by_label: Mapping[str, Sequence[Record]],
    measure: Measure,
    resamples: int,
    baseline: str = BASELINE,
) -> Speedups:
    """Compute the speedups of all methods over the baseline.

    Args:
        records_by_label: Label -> records of the method.
        measure: Returns the time of a record.
        resamples: Number of bootstrap resamples, with a fixed seed.
        baseline: Label of the baseline. Its own speedup is 1 and has no interval. For methods of
            another engine, it is vanilla of that engine.
    """
    pairs = pair_times(records_by_label.get(baseline, ()), records_by_label, measure)
    drawn = resample(pairs.times, resamples=resamples) if pairs.labels else None
    found = {
        label: _estimate_point(label, records_by_label, pairs, baseline)
        for label in records_by_label
    }
    if drawn is not None:
        rare = find_rare_questions(pairs.times)
        for label, estimate, few in zip(pairs.labels, estimate_speedups(drawn), rare, strict=True):
            if found[label].ratio is not None and label != baseline:
                found[label] = Speedup(
                    estimate.ratio, estimate.low, estimate.high, estimate.reason, few
                )
    return Speedups(found, pairs.labels, drawn)


def _estimate_point(
    label: str,
    records_by_label: Mapping[str, Sequence[Record]],
    pairs: PairedRecords,
    baseline: str,
) -> Speedup:
    """Return the estimated speedup of a method, or a note with the reason why there is none."""
    if baseline not in records_by_label and baseline != BASELINE:
        return Speedup(note=f"vanilla of its engine was not run: add --method {baseline}")
    for required_label in dict.fromkeys((baseline, label)):
        own = drop_prompt_errors(
            records_by_label.get(required_label, ()), records_by_label.get(BASELINE, ())
        )
        untimed = Counter(why for record in own if (why := untimed_reason(record)))
        if untimed.total() > MAX_UNTIMED * len(own):
            reasons = ", ".join(f"{n} {why}" for why, n in sorted(untimed.items()))
            return Speedup(
                note=f"{required_label} lost {untimed.total()} of {len(own)} outputs ({reasons})"
            )
    if label not in pairs.labels:
        return Speedup(note=f"no output is paired with one of {baseline}")
    return Speedup(1.0 if label == baseline else pairs.ratios()[label])
