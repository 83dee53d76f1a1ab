"""Laws as tables, as JSON and as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_cli import output
from specbench_cli.config.numbers import short
from specbench_cli.report.document import (
    Bullets,
    Document,
    Grid,
    Paragraph,
    Part,
    Picture,
    grid_of_values,
)
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.markdown import render
from specbench_cli.report.scaling.figure import draw
from specbench_cli.report.scaling.laws import Law, Said
from specbench_cli.report.scaling.points import FIGURES, SIZES, Point
from specbench_cli.stats.loglinear import Estimate

TITLE = "Scaling"
NOTE = (
    "y = a + b log10(size), least squares over all points of a line, each a training or a row of a"
    " run; b is what a decade adds. In brackets: 95% intervals by Student's t. Held out: the"
    " largest size, as the law of the others predicts the mean of its points, and what that came"
    " to."
)


def as_dict(law: Law) -> dict[str, Any]:
    """A law for programs."""
    fit, held = law.fit, law.held
    found: dict[str, Any] = {"figure": law.figure, "along": law.along, "where": law.where}
    found |= {"n": fit.n, "smallest": fit.smallest, "largest": fit.largest}
    found |= _ends("a", fit.a) | _ends("b", fit.b)
    found |= {"r2": fit.r2, "noise": fit.noise, "lack_of_fit_p": fit.lack}
    if held is not None:
        found |= {"held_out": held.size, "held_out_value": held.value, "held_out_n": held.of}
        found |= _ends("predicted", held.predicted) | {"inside": held.inside}
    return found | {"warnings": law.warnings}


def said_dict(said: Said) -> dict[str, Any]:
    """A prediction for programs."""
    law = said.law
    found = {"figure": law.figure, "along": law.along, "where": law.where, "at": said.size}
    predicted = {} if said.predicted is None else _ends("predicted", said.predicted)
    return {**found, **predicted, "note": said.note}


def _ends(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def cells(law: Law) -> dict[str, object]:
    """A law as a row of a table."""
    fit, held = law.fit, law.held
    found: dict[str, object] = {"figure": FIGURES[law.figure][0], "along": law.along}
    found |= {
        "where": law.where,
        "n": fit.n,
        "sizes": f"{short(fit.smallest)} - {short(fit.largest)}",
    }
    found |= {"a": _interval(fit.a), "b": _interval(fit.b), "R2": f"{fit.r2:.3f}"}
    if held is not None:
        found |= {"held out": short(held.size), "predicted": _interval(held.predicted)}
        found |= {"came to": f"{held.value:.3g}", "": "" if held.inside else "outside"}
    return found


def said_cells(said: Said) -> dict[str, object]:
    """A prediction as a row of a table."""
    law = said.law
    found = {"figure": FIGURES[law.figure][0], "where": law.where, law.along: short(said.size)}
    predicted = None if said.predicted is None else _interval(said.predicted)
    return {**found, "predicted": predicted, "note": said.note}


def _interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def warnings(laws: Sequence[Law]) -> list[str]:
    """Why not to believe some of them, a line each."""
    return [f"{law.name}: {'; '.join(law.warnings)}" for law in laws if law.warnings]


def show(laws: Sequence[Law], asked: Sequence[Said], form: output.Format) -> None:
    """Print them, and what was asked of them."""
    if form == "json":
        for record in [*map(as_dict, laws), *map(said_dict, asked)]:
            output.json_line(record)
    elif form == "tsv":
        output.tsv(map(as_dict, laws))
        if asked:
            output.tsv(map(said_dict, asked))
    else:
        output.table(map(cells, laws))
        if asked:
            output.data("")
            output.table(map(said_cells, asked))
    for line in warnings(laws):
        output.note(f"warning: {line}")


def write(
    points: Sequence[Point], laws: Sequence[Law], asked: Sequence[Said], folder: Path
) -> list[Path]:
    """Write scaling.md, scaling.json (points too), scaling.svg and scaling.png to a folder that
    exists."""
    with style.applied():
        figures = style.write(draw(laws), folder, "scaling")
    page, facts = folder / "scaling.md", folder / "scaling.json"
    words = [f"{name}: {what}" for name, what in _words(laws)]
    parts: list[Part] = [Paragraph(NOTE), Bullets(words), _grid([cells(law) for law in laws])]
    if asked:
        parts.append(_grid([said_cells(said) for said in asked]))
    if found := warnings(laws):
        parts.append(Bullets(found, title="Warnings:"))
    parts.append(Picture(figures[0].name, "Laws and residuals"))
    page.write_text(render(Document(TITLE, parts)), encoding="utf-8")
    record = {
        "points": [asdict(point) for point in points],
        "laws": [as_dict(law) for law in laws],
        "asked": [said_dict(said) for said in asked],
    }
    facts.write_text(json.dumps(_finite(record), indent=1) + "\n", encoding="utf-8")
    return [page, facts, *figures]


def _words(laws: Sequence[Law]) -> list[tuple[str, str]]:
    """What the figures and sizes of some laws are."""
    figures, sizes = {law.figure for law in laws}, {law.along for law in laws}
    found = [shown for name, shown in FIGURES.items() if name in figures]
    return found + [(name, what) for name, what in SIZES.items() if name in sizes]


def _grid(rows: Sequence[Mapping[str, object]]) -> Grid:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return grid_of_values(names, [[row.get(name) for name in names] for row in rows])


def _finite(value: Any) -> Any:
    """What JSON can hold: an interval without ends has none."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
