"""HTML report of a run in one file: tables, figures, methods, setup and token viewer.

The page loads nothing. Style, script, pictures and data are inline, and a content security policy
allows only these styles and scripts, by their hashes. All text is escaped when it is inserted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from specbench_cli import output
from specbench_cli.report import tables
from specbench_cli.report.document import Grid, Part, ReportDocument, Section, Widget
from specbench_cli.report.figures import write_figures
from specbench_cli.report.html.facts import FactLine, hide_paths, manifest_sections
from specbench_cli.report.html.figures import MAX_SVG_BYTES, InlineFigure, inline_figures
from specbench_cli.report.html.methods import MethodCard, make_cards
from specbench_cli.report.html.tokens import BUDGET, ViewerData, make_viewer_data
from specbench_cli.report.html.writer import (
    embed_json,
    read_asset,
    render_page,
    render_parts,
    template_environment,
)
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.report_data import ReportData
from specbench_cli.report.terminal.table import WIDTH
from specbench_cli.report.tokens import load_text_decoder
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import Cell
from specbench_cli.summary.facts import HOSTED
from specbench_cli.summary.metrics import LEFT_OUT_OF_BRIEF, MethodSummary, same_group
from specbench_cli.summary.pareto import find_sweep

NAME = "report.html"
_MAX_BYTES = 4_000_000
"""Maximum size of figures and token viewer together, in bytes. Tables and text are small in
comparison."""
_MAX_LISTED = 500
"""Maximum number of incidents of a kind that are listed one by one."""
_SCRIPTS = ("page.js", "tables.js", "tree.js", "viewer.js")


# ---- parts that only a page has ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline number at the top of the page."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Tiles(Widget):
    """The headline numbers as a row of tiles."""

    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class BarLegend(Widget):
    """The legend of the bars in the column "time", and notes on the tables above it."""

    text: str


@dataclass(frozen=True, slots=True)
class Figures(Widget):
    """The figures of the report, each with its caption."""

    figures: Sequence[InlineFigure]


@dataclass(frozen=True, slots=True)
class TokenViewer(Widget):
    """The token viewer.

    Attributes:
        others: Command that shows further prompts. Empty if there are none.
    """

    sample: str
    others: str
    data: Markup


@dataclass(frozen=True, slots=True)
class MethodCards(Widget):
    """One card per method, with its description and parameters."""

    cards: Sequence[MethodCard]


@dataclass(frozen=True, slots=True)
class PageParagraph(Widget):
    """A paragraph in normal text size. A `Paragraph` is small, like a note."""

    text: str


@dataclass(frozen=True, slots=True)
class ManifestFacts(Widget):
    """Facts about the run from its manifest, under headings such as "models"."""

    sections: Sequence[tuple[str, Sequence[FactLine]]]


# ---- the page ------------------------------------------------------------------------------------


def write_html(
    data: ReportData, folder: Path, *, figures: Sequence[Path] | None = None
) -> list[Path]:
    """Write `report.html`. The same records give the same bytes.

    Args:
        folder: An existing folder.
        figures: Files of figures that were drawn already. None draws them here.
    """
    file = folder / NAME
    if figures is None:
        with tempfile.TemporaryDirectory() as figure_folder:
            content = _page(
                data, write_figures(data, Path(figure_folder), max_svg_bytes=MAX_SVG_BYTES)
            )
    else:
        content = _page(data, figures)
    file.write_text(content, encoding="utf-8")
    return [file]


def _page(data: ReportData, figures: Sequence[Path]) -> str:
    document = report(data, list(inline_figures(figures)))
    return render_page(
        "report.html.j2",
        script="(() => {\n'use strict';\n" + "\n".join(map(read_asset, _SCRIPTS)) + "})();",
        title=document.title,
        lead=lead_line(data),
        facts=data.facts,
        run=hide_paths(data.name),
        sections=document.parts,
        warnings=[hide_paths(line) for line in list_warnings(data)],
        body=render_parts(document.parts),
    )


def report(data: ReportData, pictures: Sequence[InlineFigure]) -> ReportDocument:
    """Return the content of the page as a document."""
    summary, manifest = data.summary, data.run.manifest
    sweep = find_sweep(summary, manifest)
    results: list[Part] = [
        Tiles(list(_tiles(data))),
        *tables.overall_tables(summary),
        BarLegend(_notes(data)),
        *tables.family_tables(summary),
        *tables.sweep_tables(sweep),
        *([_hide_table_paths(data.spec_bench.overall())] if data.spec_bench else []),
        *map(_hide_table_paths, tables.claim_tables(summary, data.facts)),
    ]
    unchanged = [
        tables.equivalence_table(summary),
        *tables.evidence_tables(summary),
        *map(_hide_table_paths, tables.incident_tables(data.incidents, _MAX_LISTED)),
    ]
    measured = " ".join(map(hide_paths, sentences(summary, manifest)))
    parts = [
        Section("Results", results, id="results"),
        *([Section("Figures", [Figures(pictures)], id="figures")] if pictures else []),
        Section("Token by token", [_tokens(data, pictures)], id="tokens"),
        Section("Is the output unchanged?", unchanged, id="equivalence"),
        Section(
            "Methods",
            [MethodCards(make_cards(summary)), tables.detail_table(summary)],
            id="methods",
        ),
        Section(
            "How it was measured",
            [PageParagraph(measured), ManifestFacts(manifest_sections(manifest))],
            id="measured",
        ),
    ]
    return ReportDocument(heading(data), parts)


def _hide_table_paths(found: Grid) -> Grid:
    """Return a table whose absolute paths are cut to their last part, to hide user names."""

    def hide_cell_paths(cell: Cell) -> Cell:
        value = hide_paths(cell.value) if isinstance(cell.value, str) else cell.value
        return replace(cell, text=hide_paths(cell.text), value=value)

    return replace(found, rows=[[hide_cell_paths(cell) for cell in row] for row in found.rows])


def _notes(data: ReportData) -> str:
    """Return the notes below the tables of results."""
    notes = [
        "Noisy times are left out",
        *text.near_ties(data.summary),
        *text.grammar(data.summary, data.facts),
        *text.controls(data.summary),
    ]
    return f"{'. '.join(notes)}."


def _tokens(data: ReportData, pictures: Sequence[InlineFigure]) -> TokenViewer:
    """Return the token viewer.

    The page has a maximum size. The viewer may use what the figures leave of this size.
    """
    space = _MAX_BYTES - sum(len(picture.svg) + len(picture.png) for picture in pictures)
    sample = make_viewer_data(data, load_text_decoder(data.facts.target), min(BUDGET, space))
    run = hide_paths(data.name) if data.facts.runs == 1 else "RUN"
    others = f"specbench report {run} --prompt ID" if sample.total_prompts else ""
    return TokenViewer(_describe_sample(sample), others, embed_json(sample.content))


def brief(data: ReportData) -> str:
    """Return the short report of a notebook: tables over all prompts, warnings, and the proof.

    The HTML has no style and no script. All text is escaped.
    """
    rendered = (
        template_environment()
        .get_template("brief.html.j2")
        .render(
            heading=data.facts.header(data.summary.prompts, WIDTH),
            warnings=[hide_paths(line) for line in list_warnings(data)],
            tables=tables.overall_tables(data.summary, but=LEFT_OUT_OF_BRIEF),
            proof=text.proof(data.summary),
        )
    )
    return output.escape_hidden(rendered)


def heading(data: ReportData) -> str:
    """Return the heading of the page: the target, and the number of questions of each task."""
    questions = ", ".join(f"{n} questions of {t}" for t, n in data.summary.prompts.items())
    target = data.facts.target
    return f"{target} on {questions}" if questions else target


def lead_line(data: ReportData) -> str:
    """Return one line on how the run was measured: decoding, draft model, device and repeats."""
    facts = data.facts
    parts = [f"{facts.decoding} decoding, {facts.dtype}"]
    if "target" in facts.hosted:
        parts.append(f"the target ran through {HOSTED}")
    if facts.draft:
        parts.append(f"draft model {facts.draft}{facts.engine_suffix('draft')}")
    if facts.device not in ("", "auto"):
        parts.append(facts.device)
    if facts.threads:
        parts.append(_count(facts.threads, "thread", "threads"))
    parts += [_count(data.summary.passes, "process", "processes")]
    if facts.runs > 1:
        parts.append(f"{facts.runs} runs")
    if facts.constraints:
        parts.append(facts.constraints)
    if facts.seed is not None:
        parts.append(f"seed {facts.seed}")
    if facts.tuned:
        parts.append(facts.tuned)
    return "; ".join(parts) + "."


def list_warnings(data: ReportData) -> list[str]:
    """Return the warnings that a reader needs before using a number."""
    forced = [f"forced: the runs differ in {difference}" for difference in data.facts.forced]
    return [
        *forced,
        *text.few_questions(data.summary, text.more_questions(data.facts)),
        *text.rare_questions(data.summary),
        *text.warnings(data.summary, data.facts),
    ]


def _count(n: int, one: str, more: str) -> str:
    return f"{n} {one if n == 1 else more}"


def _tiles(data: ReportData) -> Iterator[Tile]:
    """Yield the headline numbers: fastest method, checked outputs, baseline and noise floor."""
    summary = data.summary
    ranked = [row for row in summary.lossless if row.letters]
    if ranked:
        yield _fastest(ranked[0], same_group(ranked[0], ranked))
    weakest = summary.proof()
    if weakest is None:
        yield Tile("output", "not compared", text.proof(summary))
    else:
        row, bound = weakest
        checked = f"{row.questions_mismatched} of {row.questions_checked} mismatched"
        whose = f"{row.label}, with the weakest proof: " if len(summary.lossless) > 2 else ""
        yield Tile(
            "output",
            checked,
            f"{whose}at most {formats.percent(bound, 0 if bound >= 0.1 else 1)} at 95%",
        )
    yield Tile(
        "vanilla / hf:vanilla",
        text.vanilla_ratio(summary),
        "the baseline of every speedup, over transformers' own",
    )
    yield Tile("noise floor", text.noise_floor(summary), "A/A: vanilla against itself")


def _fastest(best: MethodSummary, tied: Sequence[str]) -> Tile:
    """Return the headline number of the fastest lossless method.

    Args:
        best: The fastest method.
        tied: Labels of the methods that do not differ significantly from `best`.
    """
    interval = f"95% {metrics.interval(best)}. " if best.speedup_low is not None else ""
    differs = f"No significant difference from {', '.join(tied)}" if tied else "Alone in front"
    named = f"{best.label} {metrics.SPEEDUP.format(best)}"
    return Tile("fastest lossless", named, f"{interval}{differs}")


def _describe_sample(sample: ViewerData) -> str:
    """Return a sentence about which questions the viewer contains."""
    if not sample.total_prompts:
        return "The texts of these prompts were not kept."
    if sample.prompts == sample.total_prompts:
        return f"All {sample.total_prompts} questions are here. To compare one in a terminal:"
    return (
        f"This file has {sample.prompts} of {sample.total_prompts} questions: first those whose"
        " outputs differ, then others from each task family. To see another one:"
    )
