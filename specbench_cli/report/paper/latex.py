"""LaTeX report: booktabs tables, a paragraph on the measurement, references, and a document.

Each part is a separate file, so that a paper can `\\input` a single one: `overall.tex`,
`lossy.tex`, `cost.tex`, `families.tex`, `sweep.tex`, `claims.tex`, `spec-bench.tex`,
`measured.tex`; all are in `report.tex`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specbench_cli.report import claims, tables
from specbench_cli.report.document import Grid, make_grid, make_pivot_grid
from specbench_cli.report.figures import CAPTIONS
from specbench_cli.report.paper import methods_text
from specbench_cli.report.paper.bibliography import Bibliography, bibliography
from specbench_cli.report.paper.tex import Tex, escape
from specbench_cli.report.report_data import ReportData
from specbench_cli.report.spec_bench import table as spec_bench_table
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import Cell, Column
from specbench_cli.summary.metrics import COST, MAT, SPEED, MethodSummary
from specbench_cli.summary.pareto import find_sweep
from specbench_cli.summary.summary import Summary

_UNBROKEN = 10_000
"""Maximum width of a header line in characters. It is never reached: LaTeX breaks the lines."""
_TEMPLATES = Path(__file__).with_name("templates")


def write_latex(data: ReportData, folder: Path, figures: Sequence[Path] = ()) -> list[Path]:
    """Write `latex/` in a folder.

    Args:
        figures: Files of figures. The document includes the PDF of the speedup.
    """
    folder_path = folder / "latex"
    folder_path.mkdir(parents=True, exist_ok=True)
    references = bibliography(data.summary, data.run.manifest)
    parts = {name: part for name, part in _parts(data, references).items() if part}
    picture = next((file for file in figures if file.name == "speedup.pdf"), None)
    header = data.facts.header(data.summary.prompts, _UNBROKEN)
    page = _render_template(
        "report.tex.j2",
        title=", ".join(data.summary.prompts) or "no prompts",
        header=[line.replace("  ", "; ") for line in header],
        parts=parts,
        figure=None if picture is None else Tex(f"../{picture.relative_to(folder).as_posix()}"),
        caption=CAPTIONS["speedup"],
        references=bool(references.entries),
    )
    files = []
    for name, content in {**parts, "report": page}.items():
        files.append(folder_path / f"{name}.tex")
        files[-1].write_text(content, encoding="utf-8")
    if references.entries:
        files.append(folder_path / "references.bib")
        files[-1].write_text(references.text(), encoding="utf-8")
    return files


def _parts(data: ReportData, references: Bibliography) -> dict[str, str]:
    """Return file name -> content of each part. Parts without data are empty."""
    summary, letters = data.summary, _ranking_notes(data)
    small_note = text.prose(text.small_families(summary, advice=""))
    return {
        "measured": _render_template(
            "measured.tex.j2",
            sentences=methods_text.sentences(summary, data.run.manifest),
            cited=_list_citations(data, references),
        ),
        "overall": _table("overall", _OVERALL + letters, _grid(SPEED, summary.lossless)),
        "lossy": _lossy(summary),
        "cost": _table("cost", _cost(summary), _grid(COST, summary.rows)),
        "families": _table(
            "families", f"{_FAMILIES}{letters} {small_note}".rstrip(), _families(data)
        )
        + _table("families-mat", f"{_FAMILIES_MAT} {small_note}".rstrip(), _mat(summary)),
        "sweep": _sweep(data),
        "claims": _claims(data),
        "spec-bench": _spec_bench(data),
    }


_OVERALL = (
    "Speedup over vanilla in wall time and in decode time (without prefill), with 95% intervals;"
    " mean accepted tokens per step (MAT) and acceptance rate."
)
_COST = (
    "Throughput, median time to the first token (TTFT), time per token, peak memory, and the"
    " verdicts on the outputs."
)


_LOSSY = (
    "Lossy methods, not ranked with the others: speed as above, and quality. Quality is the"
    " accuracy minus vanilla's on the same questions, and minus that of a random control that"
    " accepts as many rejected tokens, both in percentage points with 95% bootstrap-t intervals"
    " over n questions."
)


def _grid(columns: Sequence[Column[MethodSummary]], rows: Sequence[MethodSummary]) -> Grid:
    """Return a table of methods. Each kind of method has its own section."""
    return make_grid(columns, rows, sections=text.sections(rows))


def _lossy(summary: Summary) -> str:
    return _table("lossy", _LOSSY, make_grid(SPEED, summary.lossy)) if summary.lossy else ""


def _cost(summary: Summary) -> str:
    return f"{_COST} {text.prose(text.work(summary))}".rstrip()


_SWEEP = (
    "Methods of the sweep by parameter: rejected draft tokens (discarded) and target forwards"
    " (verified), both per generated token. Pareto front: no other method is lower in one and at"
    " most as high in the other."
)
_FAMILIES = "Speedup over vanilla by task family, with 95% intervals."
_FAMILIES_MAT = "Mean accepted tokens per step (MAT) by task family."


def _ranking_notes(data: ReportData) -> str:
    if data.facts.forced:
        return " The runs are not comparable, so their methods are not ranked together."
    if data.facts.targets:
        return " Speedups are over vanilla on the same target, so targets are not ranked together."
    summary = data.summary
    notes = (
        "same letter: no significant difference (simultaneous 95%)",
        *text.letter_ranges(summary),
        *text.two_intervals(summary),
        *text.few_questions(summary),
        *text.rare_questions(summary),
    )
    return f" {text.prose(notes)}"


def _mat(summary: Summary) -> Grid:
    """Return MAT by family."""
    kinds = text.sections(summary.rows)
    return make_pivot_grid(summary.rows, tables.rows_by_family(summary), MAT.format, sections=kinds)


def _families(data: ReportData) -> Grid:
    """Return speedups by family, with group letters, and the interval on the line below."""
    rows, families = data.summary.rows, tables.rows_by_family(data.summary)
    upper, lower = (
        make_pivot_grid(rows, families, _speedup_with_letters),
        make_pivot_grid(rows, families, _interval_below, missing=""),
    )
    lines: list[Sequence[Cell]] = []
    kinds, sections = dict(text.sections(rows)), list[tuple[int, str]]()
    for folder_path, (above, below) in enumerate(zip(upper.rows, lower.rows, strict=True)):
        if folder_path in kinds:
            sections.append((len(lines), kinds[folder_path]))
        lines.append(above)
        if any(cell.text for cell in below[1:]):
            lines.append((Cell(""), *below[1:]))
    return Grid(upper.columns, lines, tuple(sections))


def _speedup_with_letters(row: MethodSummary) -> str:
    letters = rf"\textsuperscript{{{escape(metrics.group(row))}}}" if row.letters else ""
    return Tex(f"{escape(metrics.speedup_or_broken(row))}{letters}")


def _interval_below(row: MethodSummary) -> str:
    interval = metrics.interval(row)
    if interval == formats.NONE:
        return ""
    return Tex(rf"\scriptsize {escape(f'{interval} {metrics.accuracy_note(row)}'.rstrip())}")


def _sweep(data: ReportData) -> str:
    found = tables.sweep_tables(find_sweep(data.summary, data.run.manifest))
    return "".join(_table("sweep", _SWEEP, each) for each in found)


def _describe_source(line: claims.ClaimComparison) -> str:
    set_up = claims.format_setup(line.claim)
    return f"{set_up} ({line.claim.source})" if set_up else line.claim.source


_CLAIMS: tuple[Column[claims.ClaimComparison], ...] = (
    *(claims.METHOD, claims.CLAIMED),
    Column("there", align="l", format=_describe_source),
    *(claims.MEASURED, replace(claims.HERE, heading="here")),
)
"""Columns of the claims in a paper. The column "there" has the set-up and its source."""


def _claims(data: ReportData) -> str:
    aligns = ("l", "l", _ragged(0.28), "l", _ragged(0.25))
    found = tables.claim_tables(data.summary, data.facts, _CLAIMS)
    return "".join(_table("claims", f"{g.caption}. {g.note}", g, aligns) for g in found)


def _ragged(width: float) -> str:
    """Return a LaTeX column type for left-aligned text with line breaks.

    Args:
        width: Fraction of the line width.
    """
    return rf">{{\raggedright\arraybackslash}}p{{{width}\linewidth}}"


def _spec_bench(data: ReportData) -> str:
    spec_bench = data.spec_bench
    if spec_bench is None:
        return ""
    return _table("spec-bench", spec_bench_table.NOTE, spec_bench.overall())


def _list_citations(data: ReportData, references: Bibliography) -> list[tuple[str, Tex]]:
    """Return (name, LaTeX citation) of every method, setting, model and task with a source."""
    found = []
    for (_, name), keys in references.cited.items():
        if keys:
            found.append((name, Tex(rf"\cite{{{','.join(keys)}}}")))
    return found


def _table(label: str, caption: str, found: Grid, aligns: Sequence[str] = ()) -> str:
    """Return a table in LaTeX. A line across all columns introduces each section.

    Args:
        aligns: LaTeX column types, in place of the alignment of the columns.
    """
    lines: list[Sequence[str] | str] = [[cell.text for cell in row] for row in found.rows]
    for folder_path, kind in reversed(found.sections):
        lines.insert(folder_path, kind)
    return _render_template(
        "table.tex.j2",
        label=label,
        caption=caption,
        headings=found.headings,
        columns=Tex("".join(aligns or (column.align for column in found.columns))),
        lines=lines,
    )


def _render_template(template: str, **values: object) -> str:
    rendered: str = _environment().get_template(template).render(**values)
    return rendered.rstrip() + "\n"


@cache
def _environment() -> Environment:
    """Return the Jinja environment. Its delimiters do not occur in LaTeX. It escapes all values."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        finalize=escape,
    )
