"""Runs that do not belong together, in one table all the same: each row says its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from specbench_cli.report.numbers.row import Row
from specbench_cli.report.numbers.summary import Summary


def beside(summaries: Sequence[Summary], labels: Sequence[Mapping[str, str]]) -> Summary:
    """The rows of several summaries, run after run: nothing ranks them, so they have no letters.

    Args:
        labels: of each run, what its rows are called.
    """
    pairs = list(zip(summaries, labels, strict=True))

    def renamed(rows: Sequence[Row], own: Mapping[str, str]) -> tuple[Row, ...]:
        return tuple(
            replace(row, label=own[row.label], letters="", decode_letters="") for row in rows
        )

    families: dict[str, tuple[Row, ...]] = {}
    prompts: dict[str, int] = {}
    for summary, own in pairs:
        for family, rows in summary.families.items():
            families[family] = families.get(family, ()) + renamed(rows, own)
        for task, n in summary.prompts.items():
            prompts[task] = max(n, prompts.get(task, 0))
    floors = [summary.noise_floor for summary in summaries]
    ratios = {summary.vanilla_ratio for summary in summaries}
    return Summary(
        lossless=_by_kind(row for s, own in pairs for row in renamed(s.lossless, own)),
        lossy=_by_kind(row for s, own in pairs for row in renamed(s.lossy, own)),
        families=dict(sorted(families.items())),
        prompts=prompts,
        passes=min(summary.passes for summary in summaries),
        noise_floor=max((floor for floor in floors if floor is not None), default=None),
        vanilla_ratio=ratios.pop() if len(ratios) == 1 else None,
    )


def _by_kind(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Those that learn from prompt to prompt behind the others, as in every summary."""
    return tuple(sorted(rows, key=lambda row: row.order_matters))
