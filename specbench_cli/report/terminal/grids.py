"""Tables of a written report, as words: what Markdown and LaTeX print, each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbench_cli.config.sweep import written
from specbench_cli.report.numbers.row import Row
from specbench_cli.report.numbers.summary import Summary
from specbench_cli.report.pareto import Sweep
from specbench_cli.report.terminal import text

Align = Literal["l", "r", "c"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: heading, alignment, a row's cell, and of which rows it has something to say; an
    optional one is left out where it is empty."""

    heading: str
    align: Align
    cell: Callable[[Row], str]
    optional: bool = False
    of: Callable[[Sequence[Row]], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. sections: where its rows are of another kind than those above (`text.sections`).
    optional: places of columns that are left out where they are empty."""

    headings: tuple[str, ...]
    aligns: tuple[Align, ...]
    rows: tuple[tuple[str, ...], ...]
    sections: text.Sections = ()
    optional: frozenset[int] = frozenset()

    def trimmed(self) -> Grid:
        """Without optional columns that are empty."""
        places = [
            at
            for at in range(len(self.headings))
            if at not in self.optional or any(row[at] != text.NONE for row in self.rows)
        ]
        return Grid(
            tuple(self.headings[at] for at in places),
            tuple(self.aligns[at] for at in places),
            tuple(tuple(row[at] for at in places) for row in self.rows),
            self.sections,
            frozenset(new for new, at in enumerate(places) if at in self.optional),
        )


def _between(low: float | None, high: float | None) -> str:
    return text.NONE if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def _megabytes(row: Row) -> str:
    return text.number(None if row.peak_bytes is None else row.peak_bytes / 1e6, 0)


_NAME = Column("method", "l", lambda row: row.label)
SPEED = (
    _NAME,
    Column("group", "l", lambda row: row.letters),
    Column("speedup", "r", text.speedup),
    Column("95% CI", "c", text.interval),
    Column("decode", "r", lambda row: text.ratio(row.decode_speedup)),
    Column("95% CI", "c", lambda row: _between(row.decode_speedup_low, row.decode_speedup_high)),
    Column("MAT", "r", lambda row: text.number(row.mat)),
    Column("accept", "r", lambda row: text.percent(row.acceptance_rate)),
    Column("relaxed", "r", lambda row: text.percent(row.relaxed), optional=True),
)
"""How much faster, how sure, and how much of the drafts is accepted."""
COST = (
    _NAME,
    Column("tok/s", "r", lambda row: text.number(row.tokens_per_s, 0)),
    Column("TTFT p50 ms", "r", lambda row: text.number(row.ttft_p50_ms, 1)),
    Column("ms/token p50", "r", lambda row: text.number(row.ms_per_token_p50)),
    Column("p95", "r", lambda row: text.number(row.ms_per_token_p95)),
    Column("work", "r", lambda row: text.number(row.work), of=text.has_partial),
    Column("peak MB", "r", _megabytes),
    Column("output", "l", text.verdicts),
)
"""What a token costs, and what became of the outputs."""


def grid(columns: Sequence[Column], rows: Sequence[Row]) -> Grid:
    """A line a row."""
    shown = [column for column in columns if column.of(rows)]
    return Grid(
        tuple(column.heading for column in shown),
        tuple(column.align for column in shown),
        tuple(tuple(column.cell(row) for column in shown) for row in rows),
        text.sections(rows),
        frozenset(at for at, column in enumerate(shown) if column.optional),
    ).trimmed()


def by_family(summary: Summary, figure: Callable[[Row], str]) -> Grid:
    """A line a row, a column a family, and one for all."""
    found = {family: {row.label: row for row in rows} for family, rows in summary.families.items()}
    lines = []
    for row in summary.rows:
        parts = (rows.get(row.label) for rows in found.values())
        cells = (text.NONE if part is None else figure(part) for part in parts)
        lines.append((row.label, *cells, figure(row)))
    figures: list[Align] = ["c"] * (len(found) + 1)
    names = (text.family(family.replace("_", " "), rows.values()) for family, rows in found.items())
    return Grid(
        ("method", *names, "all"),
        ("l", *figures),
        tuple(lines),
        text.sections(summary.rows),
    )


def sweep_grid(sweep: Sweep) -> Grid:
    """A line a swept row, in the order of its parameters."""
    lines = []
    for point in sweep.points:
        row = point.row
        lines.append(
            (
                row.label,
                *(_value(row.params, name) for name in sweep.params),
                text.number(row.mat),
                text.percent(row.acceptance_rate),
                text.speedup(row),
                text.interval(row),
                text.number(row.ms_per_token_p50),
                text.number(row.discard_rate),
                text.number(row.verification_rate),
                "yes" if point.front else text.NONE,
            )
        )
    params: list[Align] = ["r"] * len(sweep.params)
    return Grid(
        ("row", *sweep.params, *_SWEEP),
        ("l", *params, "r", "r", "r", "c", "r", "r", "r", "l"),
        tuple(lines),
    )


_SWEEP = (
    "MAT",
    "accept",
    "speedup",
    "95% CI",
    "ms/token p50",
    "discarded",
    "verified",
    "Pareto front",
)


def _value(params: Mapping[str, Any], name: str) -> str:
    return written(params[name]) if name in params else text.NONE
