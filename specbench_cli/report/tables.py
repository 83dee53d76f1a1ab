"""Tables of reports: columns, title and notes of each table. All formats use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench_cli.config.sweep import format_params
from specbench_cli.predict import parallel
from specbench_cli.report import claims
from specbench_cli.report.document import Grid, make_grid, make_value_grid
from specbench_cli.report.report_data import Incidents
from specbench_cli.summary import formats, load, metrics, text
from specbench_cli.summary.columns import Cell, Column, Heading
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.pareto import Sweep, parameter_columns
from specbench_cli.summary.summary import Summary

# ---- methods -------------------------------------------------------------------------------------

_ORDER_NOTE = "They learn across prompts, so their results depend on the order of the prompts."
_KINDS = (
    (
        "lossless",
        "Lossless methods",
        "Same letter: no significant difference (simultaneous 95%). Peers are other"
        " implementations, measured in the same run.",
    ),
    ("run", "Lossless methods, run scope", f"{_ORDER_NOTE} Letters are those of all."),
    (
        "lossy",
        "Lossy: speed and quality",
        "The output is not vanilla's; these rows are not ranked with the lossless ones.",
    ),
    (
        "lossy-run",
        "Lossy: speed and quality, run scope",
        f"{_ORDER_NOTE} The output is not vanilla's.",
    ),
)
"""Kinds of methods, each with its own table: key, caption and note."""


def _key(row: MethodSummary) -> str:
    """Return the kind of a method, such as lossless or lossy: a key in `_KINDS`."""
    if row.lossless:
        return "run" if row.order_matters else "lossless"
    return "lossy-run" if row.order_matters else "lossy"


def _columns(key: str) -> Sequence[Column[MethodSummary]]:
    """Return the columns of a table for a kind of methods."""
    return metrics.LOSSY_PAGE if key.startswith("lossy") else metrics.PAGE


def _name_groups(grid: Grid) -> Grid:
    """Mark the columns that name a row.

    They are the first two columns if the first one is the significance group.
    """
    return replace(grid, label_columns=2) if grid.columns[0] is metrics.GROUP else grid


def overall_tables(summary: Summary, but: Sequence[Column[MethodSummary]] = ()) -> list[Grid]:
    """Return the tables over all prompts, without the columns in `but`.

    Lossless and lossy methods have separate tables, since they are not ranked together. Methods of
    run scope have their own table, since their results depend on the order of the prompts.
    """
    letters = text.prose(
        [
            *text.letter_ranges(summary),
            *text.two_intervals(summary),
            *text.one_process(summary),
        ]
    )
    return [
        _name_groups(
            make_grid(
                [column for column in _columns(key) if column not in but],
                rows,
                id=f"overall-{key}",
                caption=caption,
                note=f"{note} {letters if key == 'lossless' else ''}".rstrip(),
            )
        )
        for key, caption, note in _KINDS
        if (rows := [row for row in summary.rows if _key(row) == key])
    ]


def family_tables(summary: Summary) -> list[Grid]:
    """Return tables with one row per family and method, for the same kinds of methods as
    `overall_tables`.
    """
    tables = []
    note = text.prose(text.small_families(summary, "column n", advice=""))
    for key, caption, _ in _KINDS:
        rows = [
            (family.replace("_", " "), row)
            for family, own in summary.families.items()
            for row in own
            if _key(row) == key
        ]
        if not rows:
            continue
        grid = _name_groups(make_grid(_columns(key), [row for _, row in rows]))
        lines = (
            (Cell(family, family), metrics.QUESTIONS.cell(row), *cells)
            for (family, row), cells in zip(rows, grid.rows, strict=True)
        )
        family = Heading("family", "task family", "l", choose=True)
        tables.append(
            Grid(
                (family, metrics.QUESTIONS, *grid.columns),
                tuple(lines),
                id=f"family-{key}",
                caption=f"By task family, {caption.lower()}",
                note=note,
                label_columns=2 + grid.label_columns,
            )
        )
    return tables


def rows_by_family(summary: Summary) -> dict[str, dict[str, MethodSummary]]:
    """Return column heading -> label -> method, for each task family and for all prompts."""
    grid = {
        text.family(name.replace("_", " "), rows): {row.label: row for row in rows}
        for name, rows in summary.families.items()
    }
    return grid | {"all": {row.label: row for row in summary.rows}}


def _unless_empty(grid: Grid) -> list[Grid]:
    """Return a list with the table, or an empty list if the table has no rows."""
    return [grid] if grid.rows else []


def detail_table(summary: Summary) -> Grid:
    """Return the parameters and counters of each method."""
    return make_grid(metrics.DETAIL, summary.rows, id="detail", caption="Parameters and counters")


def equivalence_table(summary: Summary) -> Grid:
    """Return the verdicts on the outputs, with an upper bound on the mismatch rate."""
    return make_grid(
        metrics.EQUIVALENCE,
        summary.rows,
        id="equivalence",
        caption="Outputs against vanilla's",
        note=text.prose([text.proof(summary)]),
    )


def evidence_tables(summary: Summary) -> list[Grid]:
    """Return the table that compares sampled outputs with vanilla's, if there are any."""
    rows = [row for row in summary.rows if row.log_likelihood_difference is not None]
    note = "Evidence, not proof: the proof of a distribution is its audit (specbench audit)."
    caption = "Sampled outputs, less vanilla's"
    return _unless_empty(
        make_grid(metrics.EVIDENCE, rows, id="evidence", caption=caption, note=note)
    )


# ---- tables that some runs have ------------------------------------------------------------------


def sweep_tables(grid: Sweep | None) -> list[Grid]:
    """Return the swept methods in the order of their parameters."""
    if grid is None:
        return []
    note = (
        "Discarded: rejected draft tokens / generated tokens. Verified: target forwards /"
        " generated tokens. Pareto front: no other method is lower in one and at most as high in"
        " the other."
    )
    rows = [point.row for point in grid.points]
    return [make_grid(parameter_columns(grid), rows, id="sweep", caption="Sweep", note=note)]


def tuning_tables(tuned: Mapping[str, Any] | None) -> list[Grid]:
    """Return the table of a tuning: all candidates of each method, with their cost."""
    if not tuned:
        return []
    by_time = tuned["by"] == "time"
    unit = "ms per token" if by_time else "target forwards per token"
    note = (
        f"At most {tuned['budget']} candidates per method, all on the same development questions"
        f" ({_format_counts(tuned['development'])}), compared by"
        f" {'decode time' if by_time else 'the cost of their forwards, from the model sizes'}."
        f" All other results in this report are from the held-out questions"
        f" ({_format_counts(tuned['held_out'])})."
    )
    lines = [
        (
            label,
            " ".join(format_params(candidate["params"])) or formats.NONE,
            formats.number(candidate["cost"], 3),
            "yes" if candidate["chosen"] else None,
            tuned_method["prompts"] or None,
        )
        for label, tuned_method in tuned["rows"].items()
        for candidate in tuned_method["candidates"]
    ]
    headings = ("row", "parameters", unit, "chosen", "prompts")
    return [make_value_grid(headings, lines, caption="Tuning", note=note)]


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {n}" for family, n in counts.items())


def load_tables(rows: Sequence[load.LoadRow]) -> list[Grid]:
    """Return the latencies and rates of requests under load."""
    return _unless_empty(make_grid(load.PAGE, rows, caption=load.TITLE, note=load.NOTE))


def modelled_tables(rows: Sequence[parallel.ModelledRow]) -> list[Grid]:
    """Return the decode times modelled for methods that ran on several workers."""
    return _unless_empty(
        make_grid(parallel.COLUMNS, rows, caption=parallel.TITLE, note=parallel.NOTE)
    )


def claim_tables(
    summary: Summary,
    facts: Facts,
    columns: Sequence[Column[claims.ClaimComparison]] = claims.COLUMNS,
) -> list[Grid]:
    """Return the results that the methods' papers report, next to this run's."""
    lines = claims.compare_claims(summary, facts)
    return _unless_empty(
        make_grid(columns, lines, id="claimed", caption=claims.TITLE, note=claims.NOTE)
    )


# ---- single outputs ------------------------------------------------------------------------------

_OUTPUT = (
    Heading("method", align="l", choose=True),
    Heading("prompt", align="l"),
    Heading("turn"),
    Heading("pass"),
)


def incident_tables(incidents: Incidents, max_listed: int) -> list[Grid]:
    """Return tables of outputs that differ, failed or are noisy, at most `max_listed` of each."""
    kinds = (
        (
            "differing",
            "Outputs that differ",
            (
                Heading("verdict", align="l", choose=True),
                Heading("position", "index of the first token that differs"),
                Heading("gap", "best decision score minus that of the worst emitted token"),
                Heading("explained by width", "whether vanilla chooses the same tokens if its"
                       " forward is as wide as the method's verification", align="l"),
            ),
            incidents.differing,
        ),
        ("failed", "Failed outputs", (Heading("error", align="l"),), incidents.failed),
        (
            "void",
            "Noisy outputs",
            (Heading("other processes' CPU", "other programs ran, so the times are not used"),),
            incidents.noisy,
        ),
    )  # fmt: skip
    return [
        make_value_grid(
            (*_OUTPUT, *headings),
            cells[:max_listed],
            id=key,
            caption=caption,
            note=f"And {more} more, in records.jsonl."
            if (more := len(cells) - max_listed) > 0
            else "",
            label_columns=2,
        )
        for key, caption, headings, cells in kinds
        if cells
    ]
