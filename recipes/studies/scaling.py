"""`python -m recipes.studies scaling`: print scaling laws as tables or JSON, or write them to
files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from recipes.studies.figure import draw
from recipes.studies.laws import ScalingLaw, ScalingPrediction, fit_scaling_laws, predict_size
from recipes.studies.loglinear import IntervalEstimate
from recipes.studies.numbers import number, short
from recipes.studies.points import FIGURES, SIZES, ScalingPoint, read_points
from specbench_cli import files, output
from specbench_cli.config import options
from specbench_cli.config.commands import CONTENT, CommandOptions, Form
from specbench_cli.config.options import ARGUMENTS, OUTPUT, OVERWRITE, Option
from specbench_cli.errors import UsageError
from specbench_cli.report.document import (
    Bullets,
    Grid,
    Paragraph,
    Part,
    Picture,
    ReportDocument,
    make_value_grid,
)
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.markdown import render

TITLE = "Scaling"
NOTE = (
    "y = a + b log10(size), by least squares. A point is a trained draft or a method of a run. b is"
    " the increase per factor of ten. In brackets: 95% intervals by Student's t. Held out: the"
    " largest size, predicted by the law of the other sizes, and the measured mean of its points."
)


class ScalingOptions(CommandOptions):
    """Options of `scaling`."""

    runs: Annotated[
        list[str],
        Option(
            ARGUMENTS,
            "RUN",
            "Folders of `python -m recipes.studies grid`, or runs of several --batch.",
        ),
    ]
    at: Annotated[
        list[str],
        Option(
            CONTENT,
            "SIZE=N",
            "Predict the figures at this size: tokens=30M, layers=8, batch=16.",
            default="none",
        ),
    ] = Field([])
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "Also write files to this folder.", default="none", short="-o"),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    form: Annotated[
        Form,
        Option(OUTPUT, None, "Format of the tables; json: one object per row.", name="--format"),
    ] = "table"
    as_json: Annotated[bool, Option(OUTPUT, None, "Short for --format json.", name="--json")] = (
        False
    )


@options.parsed_command("recipes.studies.scaling:ScalingOptions")
def scaling(options: ScalingOptions) -> None:
    """Show how acceptance grows with training tokens and layers of drafts, or with the batch size.

    The command fits log-linear laws of alpha, MAT and tokens/s, with intervals, a held-out point
    and warnings. With --out it also writes the table, the points and a plot of the residuals
    (scaling.md, .json, .svg, .png).
    """
    points, out = read_points(options.runs), options.out
    laws = fit_scaling_laws(points)
    predicted = [each for word in options.at for each in predict_size(laws, *_size(word))]
    show(laws, predicted, "json" if options.as_json else options.form)
    if out is None:
        return
    try:
        with files.staging_folder(out, overwrite=options.overwrite) as staging:
            written = write(points, laws, predicted, staging)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}") from error
    for file in written:
        output.note(str(out / file.relative_to(staging)))


def _size(word: str) -> tuple[str, float]:
    """Return the name and the value of a size, from an argument of `--at` such as tokens=30M."""
    size, _, value = word.partition("=")
    try:
        wanted = number(value)
    except ValueError:
        wanted = 0.0
    if size not in SIZES or not 0 < wanted < float("inf"):
        raise UsageError(
            f"--at {word!r} must be one of {', '.join(SIZES)}, then = and a number above 0",
            hint="--at tokens=30M",
        )
    return size, wanted


def as_dict(law: ScalingLaw) -> dict[str, Any]:
    """Return a law as a flat JSON object."""
    fit, held = law.fit, law.held_out
    found: dict[str, Any] = {"figure": law.figure, "along": law.along, "where": law.where}
    found |= {"n": fit.n, "smallest": fit.smallest, "largest": fit.largest}
    found |= _ends("a", fit.a) | _ends("b", fit.b)
    found |= {"r2": fit.r2, "noise": fit.noise, "lack_of_fit_p": fit.lack_of_fit_p}
    if held is not None:
        found |= {"held_out": held.size, "held_out_value": held.value, "held_out_n": held.n}
        found |= _ends("predicted", held.predicted) | {"inside": held.is_inside}
    return found | {"warnings": law.warnings}


def prediction_as_dict(prediction: ScalingPrediction) -> dict[str, Any]:
    """Return a prediction as a flat JSON object."""
    law = prediction.law
    found = {"figure": law.figure, "along": law.along, "where": law.where, "at": prediction.size}
    predicted = {} if prediction.predicted is None else _ends("predicted", prediction.predicted)
    return {**found, **predicted, "note": prediction.note}


def _ends(name: str, estimate: IntervalEstimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def table_cells(law: ScalingLaw) -> dict[str, object]:
    """Return the cells of a table row for a scaling law, by column heading."""
    fit, held = law.fit, law.held_out
    found: dict[str, object] = {"figure": FIGURES[law.figure][0], "along": law.along}
    found |= {
        "where": law.where,
        "n": fit.n,
        "sizes": f"{short(fit.smallest)} - {short(fit.largest)}",
    }
    found |= {"a": _interval(fit.a), "b": _interval(fit.b), "R2": f"{fit.r2:.3f}"}
    if held is not None:
        found |= {"held out": short(held.size), "predicted": _interval(held.predicted)}
        found |= {"came to": f"{held.value:.3g}", "": "" if held.is_inside else "outside"}
    return found


def prediction_cells(prediction: ScalingPrediction) -> dict[str, object]:
    """Return the cells of a table row for a prediction, by column heading."""
    law = prediction.law
    found = {
        "figure": FIGURES[law.figure][0],
        "where": law.where,
        law.along: short(prediction.size),
    }
    predicted = None if prediction.predicted is None else _interval(prediction.predicted)
    return {**found, "predicted": predicted, "note": prediction.note}


def _interval(estimate: IntervalEstimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def warnings(laws: Sequence[ScalingLaw]) -> list[str]:
    """Return one line of text for each scaling law that has warnings."""
    return [f"{law.name}: {'; '.join(law.warnings)}" for law in laws if law.warnings]


def show(
    laws: Sequence[ScalingLaw], predictions: Sequence[ScalingPrediction], form: output.Format
) -> None:
    """Print the scaling laws, then their predictions."""
    if form == "json":
        for record in [*map(as_dict, laws), *map(prediction_as_dict, predictions)]:
            output.json_line(record)
    elif form == "tsv":
        output.tsv(map(as_dict, laws))
        if predictions:
            output.tsv(map(prediction_as_dict, predictions))
    else:
        output.table(map(table_cells, laws))
        if predictions:
            output.data("")
            output.table(map(prediction_cells, predictions))
    for line in warnings(laws):
        output.note(f"warning: {line}")


def write(
    points: Sequence[ScalingPoint],
    laws: Sequence[ScalingLaw],
    predictions: Sequence[ScalingPrediction],
    folder: Path,
) -> list[Path]:
    """Write the scaling laws into an existing folder.

    The files are scaling.md, scaling.json (which also contains the points), scaling.svg and
    scaling.png.
    """
    with style.figure_style():
        figures = style.write(draw(laws), folder, "scaling")
    page, facts = folder / "scaling.md", folder / "scaling.json"
    words = [f"{name}: {what}" for name, what in _words(laws)]
    parts: list[Part] = [Paragraph(NOTE), Bullets(words), _grid([table_cells(law) for law in laws])]
    if predictions:
        parts.append(_grid([prediction_cells(prediction) for prediction in predictions]))
    if found := warnings(laws):
        parts.append(Bullets(found, title="Warnings:"))
    parts.append(Picture(figures[0].name, "Laws and residuals"))
    page.write_text(render(ReportDocument(TITLE, parts)), encoding="utf-8")
    record = {
        "points": [asdict(point) for point in points],
        "laws": [as_dict(law) for law in laws],
        "asked": [prediction_as_dict(prediction) for prediction in predictions],
    }
    facts.write_text(json.dumps(_finite(record), indent=1) + "\n", encoding="utf-8")
    return [page, facts, *figures]


def _words(laws: Sequence[ScalingLaw]) -> list[tuple[str, str]]:
    """Return the name and the meaning of each figure and each kind of size in the scaling laws."""
    figures, sizes = {law.figure for law in laws}, {law.along for law in laws}
    found = [shown for name, shown in FIGURES.items() if name in figures]
    return found + [(name, what) for name, what in SIZES.items() if name in sizes]


def _grid(rows: Sequence[Mapping[str, object]]) -> Grid:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return make_value_grid(names, [[row.get(name) for name in names] for row in rows])


def _finite(value: Any) -> Any:
    """Return a value in which None replaces infinite numbers, because JSON does not allow them."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
