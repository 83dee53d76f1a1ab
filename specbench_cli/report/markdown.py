"""`report.md`: the table, the figure, how it was measured, and what did not go as it should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from specbench_cli import output
from specbench_cli.predict import parallel
from specbench_cli.report.figures import CAPTIONS
from specbench_cli.report.markdown_sweep import sweep_part, tuning_part
from specbench_cli.report.markdown_table import fenced, inline, table
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.reading import Reading
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.report.spec_bench.table import SpecBench
from specbench_cli.report.terminal import claims
from specbench_cli.report.terminal.grids import Grid, by_family, grid
from specbench_cli.report.terminal.incidents import Incidents
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.manifest import truncate_texts
from specbench_cli.summary import formats, load, metrics, text
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.forced import ByTarget, by_target
from specbench_cli.summary.metrics import Column, Row
from specbench_cli.summary.pareto import Sweep, sweep_of
from specbench_cli.summary.summary import Summary

T = TypeVar("T")
_LISTED = 50
"""Cells of a kind that are listed one by one."""


def write_markdown(reading: Reading, folder: Path, figures: Sequence[Path]) -> list[Path]:
    """Write `report.md`; `figures` are files in or below its folder."""
    manifest, summary = reading.run.manifest, reading.summary
    links = [file.relative_to(folder).as_posix() for file in figures if file.suffix == ".svg"]
    page = folder / "report.md"
    content = report(
        summary,
        manifest,
        reading.incidents,
        links,
        sweep_of(summary, manifest),
        reading.spec_bench,
        parallel.modelled_rows(reading.run.records()) if reading.parallel else (),
        load.load_rows(reading.records),
    )
    page.write_text(content, encoding="utf-8")
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
) -> str:
    """The whole report; `figures` are paths of images, relative to it."""
    cell = ("method", "prompt", "turn", "pass")
    facts = Facts.of(manifest)
    plots = [path for path in figures if _name(path) == "pareto"]
    parts = [
        f"# specbench: {inline(', '.join(summary.prompts) or 'no prompts')}",
        fenced(run_text(summary, facts)),
        *(f"![speedup over vanilla]({path})" for path in figures if _name(path) == "speedup"),
        *_by_target(by_target(summary, facts.targets), figures),
        *(sweep_part(sweep, plots) if sweep is not None else ()),
        *tuning_part(manifest.get("tuning")),
        *_load(loads),
        "## All families",
        *_figures_of(summary.rows),
        "## By task family",
        _grid(by_family(summary, _speedup)),
        *filter(None, [inline(text.prose(text.small_families(summary)))]),
        *(part for name, rows in summary.families.items() for part in _family(name, rows)),
        *_figures([path for path in figures if _name(path) not in _PLACED]),
        *_modelled(in_parallel),
        *_claims(claims.lines(summary, facts)),
        *_spec_bench(spec_bench),
        "## In detail",
        _rows(metrics.DETAIL, summary.rows),
        "## Equivalence",
        _rows(metrics.EQUIVALENCE, summary.rows),
        *_evidence(summary),
        "## How it was measured",
        inline(" ".join(sentences(summary, manifest))),
        table(("setting", "value"), _settings(manifest)),
        *_cells("Outputs that differ", (*cell, *_DIFFERENCE), incidents.differing),
        *_cells("Failed cells", (*cell, "error"), incidents.failed),
        *_cells("Void cells", (*cell, "other processes' CPU"), incidents.void),
    ]
    return output.plain("\n\n".join(parts)) + "\n"


def _family(name: str, rows: Sequence[Row]) -> list[str]:
    """All figures of a family's rows."""
    return [f"### {inline(text.family(name, rows))}", *_figures_of(rows)]


def _figures_of(rows: Sequence[Row]) -> list[str]:
    """How fast and at what cost; rows of another kind in tables of their own."""
    kinds = text.sections(rows)
    parts = [
        _parted(rows, kinds, partial(_rows, chosen)) for chosen in (metrics.SPEED, metrics.COST)
    ]
    told = [row for row in rows if row.draft_kept is not None]
    if told:
        parts += [_LEDGER, _rows((metrics.METHOD, *metrics.LEDGER), told)]
    return parts


_LEDGER = "Ledger of lossy rows: who wrote how many tokens, and what became of them."


def _rows(chosen: Sequence[Column], rows: Sequence[Row]) -> str:
    found = grid(chosen, rows)
    return table(found.headings, found.rows)


def _grid(found: Grid) -> str:
    return _parted(found.rows, found.sections, partial(table, found.headings))


def _parted(rows: Sequence[T], kinds: text.Sections, draw: Callable[[Sequence[T]], str]) -> str:
    """A table of the rows; those of another kind in one of their own, under a line that says
    which."""
    starts = [(0, ""), *kinds, (len(rows), "")]
    parts = []
    for (first, kind), (end, _) in pairwise(starts):
        parts += [f"{inline(kind.capitalize())}."] * bool(kind)
        parts += [draw(rows[first:end])] * (first < end)
    return "\n\n".join(parts)


def _speedup(row: Row) -> str:
    """With the group it is in, its interval and what it costs, as far as it has them."""
    shown = (metrics.speedup_or_broken, metrics.group, metrics.interval, metrics.at_what_cost)
    words = [cell(row) for cell in shown]
    return " ".join(word for word in words if word and word != formats.NONE) or formats.NONE


def _priced(row: Row) -> str:
    return f"{metrics.speedup_or_broken(row)} {metrics.at_what_cost(row)}".rstrip()


def _modelled(rows: Sequence[parallel.ModelledRow]) -> list[str]:
    if not rows:
        return []
    lines = table(parallel.HEADINGS, (row.cells() for row in rows))
    return [f"## {parallel.TITLE}", parallel.NOTE, lines]


def _load(rows: Sequence[load.LoadRow]) -> list[str]:
    if not rows:
        return []
    knees = "\n".join(f"- {inline(line)}" for line in load.saturation(rows))
    lines = table(load.HEADINGS, map(load.cells, rows))
    return [part for part in (f"## {load.TITLE}", load.NOTE, lines, knees) if part]


def _claims(found: Sequence[claims.Line]) -> list[str]:
    if not found:
        return []
    lines = table(claims.HEADINGS, (line.cells() for line in found))
    return [f"## {claims.TITLE}", claims.NOTE, lines]


def _spec_bench(found: SpecBench | None) -> list[str]:
    if found is None:
        return []
    parts = [f"## {spec_bench_table.TITLE}", spec_bench_table.NOTE, inline(text.prose(found.notes))]
    parts += [_grid(found.overall()), _grid(found.by_family())]
    return [part for part in parts if part]


def _by_target(found: ByTarget | None, figures: Sequence[str]) -> list[str]:
    """A matrix: a line a method, a column a target."""
    if found is None:
        return []
    parts = ["## By target"]
    for title, figure in (("speedup", _priced), ("MAT", metrics.MAT.shown)):
        lines = (
            (row.label, *(_cell(own, row.label, figure) for own in found.targets.values()))
            for row in found.rows
        )
        parts.append(table((title, *found.targets), lines))
    return [*parts, *(_shown(path) for path in figures if _name(path) == "targets")]


def _cell(own: Mapping[str, Row], label: str, figure: Callable[[Row], str]) -> str | None:
    return figure(own[label]) if label in own else None


_PLACED = ("speedup", "pareto", "targets")
"""The figures that have a place of their own."""


def _figures(paths: Sequence[str]) -> list[str]:
    """The figures that have no place of their own, each under its caption."""
    return ["## Figures", *map(_shown, paths)] if paths else []


def _shown(path: str) -> str:
    return f"{CAPTIONS[_name(path)]}\n\n![{_name(path)}]({path})"


def _name(path: str) -> str:
    """A figure's, by the path of its file."""
    return PurePosixPath(path).stem


_DIFFERENCE = ("verdict", "position", "gap", "explained by width")


def _evidence(summary: Summary) -> list[str]:
    """Sampled outputs against vanilla's; nothing where none were compared."""
    rows = [row for row in summary.rows if row.log_likelihood_difference is not None]
    title = "## Sampled outputs, less vanilla's: evidence and no proof"
    return [title, _rows(metrics.EVIDENCE, rows)] if rows else []


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The manifest, flattened to a line a fact, with the source of each configured value."""
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


def _cells(title: str, headings: Sequence[str], cells: Sequence[Sequence[object]]) -> list[str]:
    if not cells:
        return []
    parts = [f"## {title}", table(headings, cells[:_LISTED])]
    if len(cells) > _LISTED:
        parts.append(f"And {len(cells) - _LISTED} more, in records.jsonl.")
    return parts
