"""Tables of runs whose methods cannot be ranked together.

Runs cannot be ranked together if they are incompatible (`specbench report --force`), or have
different targets. Each label in the table contains the name of its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary


def join_forced(
    summaries: Sequence[Summary],
    labels: Sequence[Mapping[str, str]],
    *,
    by_method: bool = False,
) -> Summary:
    """Join the summaries of several runs. Methods are not ranked, so they have no group letters.

    Args:
        labels: For each run, label in the run -> label in the table.
        by_method: True to sort by method, so that the same method of several runs is adjacent.
            False sorts by run.
    """
    pairs = list(zip(summaries, labels, strict=True))
    all_labels = [row.label for summary in summaries for row in summary.rows]
    positions = {label: all_labels.index(label) if by_method else 0 for label in all_labels}

    def join_rows(
        parts: Iterable[tuple[Sequence[MethodSummary], Mapping[str, str]]],
    ) -> tuple[MethodSummary, ...]:
        rows = [(row, own[row.label]) for part, own in parts for row in part]
        rows.sort(key=lambda each: (each[0].order_matters, positions[each[0].label]))
        return tuple(
            replace(row, label=label, letters="", decode_letters="") for row, label in rows
        )

    families = {family for summary in summaries for family in summary.families}
    prompts: dict[str, int] = {}
    for summary in summaries:
        for task, n in summary.prompts.items():
            prompts[task] = max(n, prompts.get(task, 0))
    floors = [summary.noise_floor for summary in summaries]
    ratios = {summary.vanilla_ratio for summary in summaries}
    return Summary(
        lossless=join_rows((summary.lossless, own) for summary, own in pairs),
        lossy=join_rows((summary.lossy, own) for summary, own in pairs),
        families={
            family: join_rows((summary.families.get(family, ()), own) for summary, own in pairs)
            for family in sorted(families)
        },
        prompts=prompts,
        passes=min(summary.passes for summary in summaries),
        noise_floor=max((floor for floor in floors if floor is not None), default=None),
        vanilla_ratio=ratios.pop() if len(ratios) == 1 else None,
    )


@dataclass(frozen=True, slots=True)
class TargetSummaries:
    """Results on several targets, as a table with one column per target.

    rows: One row per method, or per method and draft. Vanilla is omitted, since its speedup is
        always 1. targets: Target -> label in `rows` -> metrics of the method on the target.
    """

    rows: tuple[MethodSummary, ...]
    targets: Mapping[str, Mapping[str, MethodSummary]]


def group_by_target(summary: Summary, runs: Sequence[str]) -> TargetSummaries | None:
    """Return the results by target. None if the run has only one target.

    Args:
        runs: Names of the runs, TARGET or TARGET+DRAFT. The label of a method ends with one.
    """
    if not runs:
        return None
    rows: dict[str, MethodSummary] = {}
    targets: dict[str, dict[str, MethodSummary]] = {run.partition("+")[0]: {} for run in runs}
    for row in summary.rows:
        label, _, run = row.label.rpartition(" @")
        target, _, draft = run.partition("+")
        if label == BASELINE:
            continue
        if draft and row.draft_model is not None:
            label = f"{label} @{draft}"
        rows.setdefault(label, replace(row, label=label))
        targets[target][label] = row
    return TargetSummaries(tuple(rows.values()), targets)
