"""Tests that point labels overlap neither points nor each other, also for the reference runs."""

from __future__ import annotations

import csv
import itertools
import json
import time
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from specbench_cli.report.figures import cost, pareto, prompts, speedup, waterfall
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.drawing.labels import PointLabel, place_labels
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.pareto import find_sweep
from specbench_cli.summary.summary import Summary

REFERENCE = Path(__file__).parents[3] / "results/reference"
_RADIUS = 2.2
"""Radius of the markers of `cost` and `pareto`, in points."""


def misplaced(figure: Figure) -> list[tuple[str, str]]:
    """Return the labels that overlap a label or a point, or are outside their axes."""
    figure.draw_without_rendering()
    renderer, found = figure.canvas.get_renderer(), list[tuple[str, str]]()
    radius = _RADIUS * figure.dpi / 72
    for axes in figure.axes:
        # Text's method: that of an annotation would include the line to its point.
        boxes = [(text, Text.get_window_extent(text, renderer)) for text in axes.texts]
        marks = [line for line in axes.lines if line.get_marker() in [*style.MARKERS]]
        points = [
            axes.transData.transform(points) for each in marks for points in each.get_xydata()
        ]
        for (text, a), (other, b) in itertools.combinations(boxes, 2):
            found += [(text.get_text(), other.get_text())] * bool(a.overlaps(b))
        for text, box in boxes:
            if text.get_path_effects():  # only point labels have a halo
                wide = box.padded(radius)
                found += [
                    (text.get_text(), "a point") for points in points if wide.contains(*points)
                ]
                ends = (box.x0, box.y0), (box.x1, box.y1)
                inside = all(axes.bbox.contains(*end) for end in ends)
                found += [(text.get_text(), "an edge")] * (not inside)
    return found


@pytest.fixture(scope="module", params=["default-2cores", "trees-2cores", "methods-2cores"])
def reference_run(request) -> FigureData:
    """The figure data of a reference run. Without its records, only the summary is available."""
    folder = REFERENCE / request.param
    if (folder / "records.jsonl").exists():
        return FigureData.from_report(read_report_data(RunDir.open(folder)))
    summary = from_csv(folder / "summary.csv")
    return FigureData(summary, {}, {row.label: [] for row in summary.rows})


def from_csv(file: Path) -> Summary:
    """Return the summary in a `summary.csv`. Columns that an older file lacks are None."""
    kinds = get_type_hints(MethodSummary)
    scopes: dict[str, list[MethodSummary]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            figures = {
                name: _value(line.get(name) or "", kind, name) for name, kind in kinds.items()
            }
            scopes.setdefault(line["family"], []).append(MethodSummary(**figures))
    rows = scopes.pop("all")
    lossless = tuple(row for row in rows if row.lossless)
    lossy = tuple(row for row in rows if not row.lossless)
    return Summary(lossless, lossy, {k: tuple(v) for k, v in scopes.items()}, {}, 1, None, None)


def _value(text: str, kind: type, name: str) -> object:
    if name == "acceptance_by_position":
        return tuple(map(float, text.split()))
    if name == "params":
        return {}
    if not text:
        return None
    kind = next((part for part in get_args(kind) if part is not NoneType), kind)
    return text == "True" if kind is bool else kind(text)


def test_labels_of_a_reference_run_do_not_overlap(reference_run, check_legible):
    figure = cost.draw(reference_run)
    assert misplaced(figure) == []
    check_legible(figure)
    assert {text.get_text() for text in figure.axes[0].texts} >= {
        style.shorten(row.label)
        for row in reference_run.summary.rows
        if row.decode_speedup and row.mat
    }
    for draw in (speedup.draw, waterfall.draw, prompts.draw):
        figure = draw(reference_run.summary if draw is speedup.draw else reference_run)
        if figure is not None:
            check_legible(figure)


def test_labels_of_a_reference_sweep_do_not_overlap(check_legible):
    folder = REFERENCE / "lengths-2cores"
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    figure = pareto.draw(find_sweep(from_csv(folder / "summary.csv"), manifest))
    assert misplaced(figure) == []
    check_legible(figure)


def test_labels_of_close_points_do_not_overlap_and_stay_inside():
    figure = style.new_figure(3, 3)
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.5 + n / 100, 0.5) for n in range(4)] + [(1, 0.9)]
    axes.plot(*zip(*points, strict=True), "o")
    place_labels(axes, [PointLabel(f"word {n}", point, "black") for n, point in enumerate(points)])
    assert len(axes.texts) == len(points) and misplaced(figure) == []


def test_many_labels_are_placed_in_seconds():
    figure = style.new_figure(6, 6)
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    points = [(n % 16 / 16, n // 16 / 8) for n in range(128)]
    start = time.process_time()
    place_labels(axes, [PointLabel(f"word {n}", point, "black") for n, point in enumerate(points)])
    assert len(axes.texts) == 128
    assert time.process_time() - start < 15  # trying every order to its end takes 35 s
