"""Content of `report.md`: results, details, incidents, and how the run was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from specbench_cli.predict import parallel
from specbench_cli.report import tables
from specbench_cli.report.document import (
    Bullets,
    Grid,
    Paragraph,
    Part,
    Picture,
    Preformatted,
    ReportDocument,
    Section,
    make_grid,
    make_pivot_grid,
    make_value_grid,
)
from specbench_cli.report.figures import CAPTIONS
from specbench_cli.report.markdown import render
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.report_data import Incidents, ReportData
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.report.spec_bench.table import SpecBench
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.manifest import truncate_texts
from specbench_cli.summary import formats, load, metrics, text
from specbench_cli.summary.columns import Column
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.pareto import Sweep, find_sweep
from specbench_cli.summary.summary import Summary
from specbench_cli.summary.unranked import TargetSummaries, group_by_target

_MAX_LISTED = 50
"""Maximum number of incidents of a kind that are listed one by one."""
_FIGURES_IN_SECTIONS = ("speedup", "pareto", "targets")
"""Figures that have their own section. The others share the section "Figures"."""
_TOKEN_ACCOUNTING = (
    "Token accounting of lossy methods: tokens by author, kept in the output or discarded."
)


def write_markdown(data: ReportData, folder: Path, figures: Sequence[Path]) -> list[Path]:
    """Write `report.md`.

    Args:
        figures: Files in the report's folder or below it.
    """
    manifest, summary = data.run.manifest, data.summary
    links = [file.relative_to(folder).as_posix() for file in figures if file.suffix == ".svg"]
    page = folder / "report.md"
    document = report(
        summary,
        manifest,
        data.incidents,
        links,
        find_sweep(summary, manifest),
        data.spec_bench,
        parallel.modelled_rows(data.run.records()) if data.parallel else (),
        load.load_rows(data.records),
    )
    page.write_text(render(document), encoding="utf-8")
    return [page]


def report(
    summary: Summary,
    manifest: Mapping[str, Any],
    incidents: Incidents,
    figures: Sequence[str],
    sweep: Sweep | None = None,
    spec_bench: SpecBench | None = None,
    in_parallel: Sequence[parallel.ModelledRow] = (),
    loads: Sequence[load.LoadRow] = (),
) -> ReportDocument:
    """Return the whole report as a document.

    Args:
        figures: Paths of images, relative to the report.
    """
    facts, rows = Facts.from_manifest(manifest), summary.rows
    parts: list[Part] = [
        Preformatted(run_text(summary, facts)),
        *(Picture(path, "speedup over vanilla") for path in _paths_of_figure(figures, "speedup")),
        *_target_parts(group_by_target(summary, facts.targets), figures),
        *_sweep_parts(sweep, _paths_of_figure(figures, "pareto")),
        *map(_table_section, tables.tuning_tables(manifest.get("tuning"))),
        *(_table_section(each, load.saturation_notes(loads)) for each in tables.load_tables(loads)),
        Section("All families", _metric_tables(rows)),
        Section("By task family", [*_family_parts(summary)]),
        *_figure_parts(
            [path for path in figures if _figure_name(path) not in _FIGURES_IN_SECTIONS]
        ),
        *map(_table_section, tables.modelled_tables(in_parallel)),
        *map(_table_section, tables.claim_tables(summary, facts)),
        *_spec_bench_parts(spec_bench),
        Section("In detail", [tables.detail_table(summary)]),
        Section("Equivalence", [tables.equivalence_table(summary)]),
        *(
            Section(f"{e.caption}: evidence and no proof", [e])
            for e in tables.evidence_tables(summary)
        ),
        Section(
            "How it was measured",
            [
                Paragraph(" ".join(sentences(summary, manifest))),
                make_value_grid(("setting", "value"), _settings(manifest)),
            ],
        ),
        *map(_list_section, tables.incident_tables(incidents, _MAX_LISTED)),
    ]
    return ReportDocument(f"specbench: {', '.join(summary.prompts) or 'no prompts'}", parts)


def _table_section(table: Grid, lines: Sequence[str] = ()) -> Section:
    """Return a section with a table, the table's note above it, and a list of lines below it."""
    bullets = [Bullets(lines)] if lines else []
    return Section(table.caption, [Paragraph(table.note), table, *bullets])


def _list_section(table: Grid) -> Section:
    """Return a section with a table of outputs. A note gives the number of outputs left out."""
    more = [Paragraph(table.note)] if table.note else []
    return Section(table.caption, [table, *more])


# ---- results -------------------------------------------------------------------------------------


def _family_parts(summary: Summary) -> Iterator[Part]:
    """Yield the speedups by family, and then all metrics of each family."""
    rows, kinds = summary.rows, text.sections(summary.rows)
    yield make_pivot_grid(rows, tables.rows_by_family(summary), _speedup, sections=kinds)
    if notes := text.prose(text.small_families(summary)):
        yield Paragraph(notes)
    for name, rows in summary.families.items():
        yield Section(text.family(name, rows), _metric_tables(rows), level=3)


def _metric_tables(rows: Sequence[MethodSummary]) -> list[Part]:
    """Return the tables of speed and cost, and of token accounting if a method reports it."""
    parts = [
        part for columns in (metrics.SPEED, metrics.COST) for part in _tables_by_kind(columns, rows)
    ]
    with_accounting = [row for row in rows if row.draft_kept is not None]
    if with_accounting:
        accounting = make_grid((metrics.METHOD, *metrics.TOKEN_ACCOUNTING), with_accounting)
        parts += [Paragraph(_TOKEN_ACCOUNTING), accounting]
    return parts


def _tables_by_kind(
    columns: Sequence[Column[MethodSummary]], rows: Sequence[MethodSummary]
) -> Iterator[Part]:
    """Yield one table for each kind of methods: lossless, learning over the run, lossy, and of
    another engine.

    A table omits the columns that are empty for all its methods.
    """
    starts = [(0, ""), *text.sections(rows), (len(rows), "")]
    for (first, kind), (end, _) in pairwise(starts):
        if kind:
            yield Paragraph(f"{kind.capitalize()}.")
        if first < end:
            yield make_grid(columns, rows[first:end])


def _speedup(row: MethodSummary) -> str:
    """Format a speedup. Add its significance group, interval and accuracy loss if they
    are known.
    """
    formatters = (metrics.speedup_or_broken, metrics.group, metrics.interval, metrics.accuracy_note)
    words = [cell(row) for cell in formatters]
    return " ".join(word for word in words if word and word != formats.NONE) or formats.NONE


def _format_speedup(row: MethodSummary) -> str:
    return f"{metrics.speedup_or_broken(row)} {metrics.accuracy_note(row)}".rstrip()


def _target_parts(table: TargetSummaries | None, figures: Sequence[str]) -> Iterator[Part]:
    """Yield tables of speedup and MAT for a run on several targets, with one column per target."""
    if table is None:
        return
    grids = [
        make_pivot_grid(table.rows, table.targets, format_entry, heading=title)
        for title, format_entry in (("speedup", _format_speedup), ("MAT", metrics.MAT.format))
    ]
    yield Section("By target", [*grids, *_captioned_figures(_paths_of_figure(figures, "targets"))])


def _sweep_parts(sweep: Sweep | None, figures: Sequence[str]) -> Iterator[Part]:
    """Yield the table of a parameter sweep, sorted by parameters, and the plots of the sweep."""
    for table in tables.sweep_tables(sweep):
        plots = (Picture(path, "discard and verification rates") for path in figures)
        yield Section(table.caption, [table, *plots])


def _spec_bench_parts(table: SpecBench | None) -> Iterator[Part]:
    if table is not None:
        notes = [spec_bench_table.NOTE, text.prose(table.notes)]
        paragraphs = [Paragraph(note) for note in notes if note]
        grids = (table.overall(), table.by_family())
        yield Section(spec_bench_table.TITLE, [*paragraphs, *grids])


# ---- figures -------------------------------------------------------------------------------------


def _figure_parts(paths: Sequence[str]) -> Iterator[Part]:
    """Yield the section of the figures that have no section of their own."""
    if paths:
        yield Section("Figures", list(_captioned_figures(paths)))


def _captioned_figures(paths: Sequence[str]) -> Iterator[Part]:
    for path in paths:
        yield Paragraph(CAPTIONS[_figure_name(path)])
        yield Picture(path, _figure_name(path))


def _paths_of_figure(paths: Sequence[str], name: str) -> list[str]:
    return [path for path in paths if _figure_name(path) == name]


def _figure_name(path: str) -> str:
    """Return the name of the figure that a file shows, such as "speedup"."""
    return PurePosixPath(path).stem


# ---- how it was measured -------------------------------------------------------------------------


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return (name, value) of all facts in the manifest. The value of a setting includes its
    source.
    """
    manifest = truncate_texts(dict(manifest))
    sources = manifest.get("config_sources", {})
    lines: list[tuple[str, object]] = []
    for key in ("created_utc", "finished_utc", "status", "noisy"):
        lines.append((key, manifest.get(key)))
    for key, value in manifest.get("config", {}).get("effective", {}).items():
        source = sources.get(key)
        lines.append((key, f"{value} ({source})" if source else value))
    for section in (
        "runs",
        "models",
        "heads",
        "machine",
        "versions",
        "git",
        "tolerance",
        "step_costs",
    ):
        for key, value in (manifest.get(section) or {}).items():
            lines.append((f"{section}.{key}", value))
    for task in manifest.get("tasks", []):
        lines.append((f"task {task['name']}", {k: v for k, v in task.items() if k != "name"}))
    return lines
