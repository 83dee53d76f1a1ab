"""One self-contained HTML file: tables, figures, methods, set-up, and the token viewer.

It loads nothing: style, script, pictures and data are inline, and a content security policy allows
no other script or style than these, by their hashes. All text is escaped on its way in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specbench_cli import output
from specbench_cli.report.figures import write_figures
from specbench_cli.report.html import tables
from specbench_cli.report.html.facts import public, sections
from specbench_cli.report.html.figures import HEAVIEST, inlined
from specbench_cli.report.html.methods import cards
from specbench_cli.report.html.tokens import BUDGET, Viewer, viewer
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.reading import Reading
from specbench_cli.report.terminal.table import WIDTH
from specbench_cli.report.tokens import decoder_of
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.facts import HOSTED
from specbench_cli.summary.metrics import LEFT_OUT_OF_BRIEF, Row, alike
from specbench_cli.summary.pareto import sweep_of

NAME = "report.html"
_ROOM = 4_000_000
"""Bytes for figures and token viewer; tables and texts are small beside them."""
_TEMPLATES = Path(__file__).with_name("templates")
_SCRIPTS = ("page.js", "tables.js", "tree.js", "viewer.js")
_SECTIONS = {
    "results": "Results",
    "figures": "Figures",
    "tokens": "Token by token",
    "equivalence": "Is the output unchanged?",
    "methods": "Methods",
    "measured": "How it was measured",
}
_UNSAFE = "<>&\u2028\u2029"
_ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in _UNSAFE}


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the head of the page."""

    name: str
    value: str
    note: str


def write_html(
    reading: Reading, folder: Path, *, figures: Sequence[Path] | None = None
) -> list[Path]:
    """Write `report.html`: the same bytes for the same records.

    Args:
        folder: where to; it exists.
        figures: files of the figures, if they are drawn already; None draws them.
    """
    file = folder / NAME
    if figures is None:
        with tempfile.TemporaryDirectory() as drawn:
            page = _page(reading, write_figures(reading, Path(drawn), heavy=HEAVIEST))
    else:
        page = _page(reading, figures)
    file.write_text(output.plain(page), encoding="utf-8")
    return [file]


def _page(reading: Reading, figures: Sequence[Path]) -> str:
    summary, facts, manifest = reading.summary, reading.facts, reading.run.manifest
    style = asset("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(asset, _SCRIPTS)) + "})();"
    pictures = list(inlined(figures))
    room = _ROOM - sum(len(picture.svg) + len(picture.png) for picture in pictures)
    shown = viewer(reading, decoder_of(facts.target), min(BUDGET, room))
    run = public(reading.name)
    page = environment().get_template("report.html.j2")
    return page.render(
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        title=f"specbench: {heading(reading)}",
        heading=heading(reading),
        lead=lead(reading),
        facts=facts,
        run=run,
        sections=[(k, v) for k, v in _SECTIONS.items() if k != "figures" or pictures],
        warnings=[public(line) for line in warned(reading)],
        tiles=list(_tiles(reading)),
        notes=[
            "Void cells' times are left out",
            *text.near_ties(summary),
            *text.grammar(summary, facts),
            *text.controls(summary),
        ],
        overall=tables.overall(summary),
        more=_more(reading),
        families=tables.by_family(summary),
        figures=pictures,
        sample=_sample(shown),
        others=f"specbench report {run if facts.runs == 1 else 'RUN'} --prompt ID"
        if shown.of
        else "",
        viewer=embedded(shown.data),
        equivalence=_equivalence(reading),
        cards=cards(summary),
        detail=tables.in_detail(summary),
        measured=" ".join(map(public, sentences(summary, manifest))),
        manifest=sections(manifest),
    )


def brief(reading: Reading) -> str:
    """What a notebook shows of a run: the tables over all prompts, and what must be known of them.
    HTML without style and script; all text is escaped."""
    page = environment().get_template("brief.html.j2")
    rendered = page.render(
        heading=reading.facts.header(reading.summary.prompts, WIDTH),
        warnings=[public(line) for line in warned(reading)],
        tables=tables.overall(reading.summary, but=LEFT_OUT_OF_BRIEF),
        proof=text.proof(reading.summary),
    )
    return output.plain(rendered)


def embedded(data: Any) -> Markup:
    """JSON that may stand in a script element: nothing in it can end that element."""
    said = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(output.plain(said.translate(_ESCAPED), lead="\\\\"))


def environment(*folders: Path) -> Environment:
    """Templates of pages, those of this one and of more folders; all that they show is escaped."""
    return Environment(
        loader=FileSystemLoader([_TEMPLATES, *folders]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def asset(name: str) -> str:
    """A style sheet or a script of the page."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def policy(style: str, script: str = "") -> str:
    """What a page may do: run its own script, if it has one, wear its own style, show its own
    pictures."""

    def digest(source: str) -> str:
        return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()

    runs = f" script-src 'sha256-{digest(script)}';" if script else ""
    return (
        f"default-src 'none';{runs} style-src 'sha256-{digest(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def heading(reading: Reading) -> str:
    """What was run on what."""
    questions = ", ".join(f"{n} questions of {t}" for t, n in reading.summary.prompts.items())
    target = reading.facts.target
    return f"{target} on {questions}" if questions else target


def lead(reading: Reading) -> str:
    """How it was run, in a line."""
    facts = reading.facts
    parts = [f"{facts.decoding} decoding, {facts.dtype}"]
    if "target" in facts.hosted:
        parts.append(f"the target ran through {HOSTED}")
    if facts.draft:
        parts.append(f"draft model {facts.draft}{facts.through('draft')}")
    if facts.device not in ("", "auto"):
        parts.append(facts.device)
    if facts.threads:
        parts.append(_counted(facts.threads, "thread", "threads"))
    parts += [_counted(reading.summary.passes, "process", "processes")]
    if facts.runs > 1:
        parts.append(f"{facts.runs} runs")
    if facts.law:
        parts.append(facts.law)
    if facts.seed is not None:
        parts.append(f"seed {facts.seed}")
    if facts.tuned:
        parts.append(facts.tuned)
    return "; ".join(parts) + "."


def warned(reading: Reading) -> list[str]:
    """What must be known before a figure is used."""
    forced = [f"forced: the runs differ in {said}" for said in reading.facts.forced]
    return [
        *forced,
        *text.few_questions(reading.summary, text.more_questions(reading.facts)),
        *text.rare_questions(reading.summary),
        *text.warnings(reading.summary, reading.facts),
    ]


def _more(reading: Reading) -> list[tables.Table]:
    """Tables that some runs have."""
    sweep = sweep_of(reading.summary, reading.run.manifest)
    found = (
        None if sweep is None else tables.sweep_table(sweep),
        tables.spec_bench(reading),
        tables.claimed(reading),
    )
    return [table for table in found if table is not None]


def _counted(n: int, one: str, more: str) -> str:
    return f"{n} {one if n == 1 else more}"


def _tiles(reading: Reading) -> Iterator[Tile]:
    """What a reader wants to know first."""
    summary = reading.summary
    ranked = [row for row in summary.lossless if row.letters]
    if ranked:
        yield _fastest(ranked[0], alike(ranked[0], ranked))
    weakest = summary.proof()
    if weakest is None:
        yield Tile("output", "not compared", text.proof(summary))
    else:
        row, bound = weakest
        checked = f"{row.questions_mismatched} of {row.questions_checked} mismatched"
        whose = f"{row.label}, which is proved least: " if len(summary.lossless) > 2 else ""
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


def _fastest(best: Row, equal: Sequence[str]) -> Tile:
    """The best lossless row, with those that cannot be told from it."""
    interval = f"95% {metrics.interval(best)}. " if best.speedup_low is not None else ""
    differs = f"No significant difference from {', '.join(equal)}" if equal else "Alone in front"
    named = f"{best.label} {metrics.SPEEDUP.shown(best)}"
    return Tile("fastest lossless", named, f"{interval}{differs}")


def _sample(shown: Viewer) -> str:
    """What of the run the viewer has."""
    if not shown.of:
        return "The texts of these prompts were not kept."
    if shown.prompts == shown.of:
        return f"All {shown.of} questions are here. In a terminal, a text beside vanilla's:"
    return (
        f"{shown.prompts} of {shown.of} questions are in this file, outputs that differ first, the"
        f" others spread over the families. Any other:"
    )


def _equivalence(reading: Reading) -> list[tables.Table]:
    summary = reading.summary
    found = tables.evidence(summary)
    return [
        tables.equivalence(summary),
        *([] if found is None else [found]),
        *tables.incidents(reading),
    ]
