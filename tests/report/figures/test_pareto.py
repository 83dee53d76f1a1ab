"""Tests of the figure of a sweep: its legend and its points."""

from __future__ import annotations

import pytest

from specbench_cli.report.figures import pareto
from specbench_cli.summary.pareto import find_sweep
from specbench_cli.summary.summary import summarise


@pytest.fixture
def sweep(swept_run, manifest):
    """Return the sweep of a run in which one swept row is an upper bound."""
    manifest["upper_bounds"] = ["sps length=5"]
    return lambda **config: find_sweep(*swept_run(**config))


def test_legend_is_below_the_axes_and_has_upper_bounds(sweep, check_legible):
    # These are more entries than fit into one row of the legend.
    figure = pareto.draw(sweep())
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6
    assert "sps (not ranked)" in [text.get_text() for text in legend.get_texts()]
    figure.draw_without_rendering()
    top = legend.get_window_extent(renderer).y1
    assert all(axes.get_tightbbox(renderer).y0 >= top for axes in figure.axes)
    check_legible(figure)


def test_points_are_at_the_rates_of_their_methods(sweep):
    found = sweep()
    drawn = {tuple(at) for line in pareto.draw(found).axes[0].lines for at in line.get_xydata()}
    for point in found.points:
        if point.along:
            assert (point.row.discard_rate, point.row.verification_rate) in drawn


def test_figure_is_drawn_for_text_values_and_without_speedups(sweep, synthetic, manifest):
    for p in (found := sweep(sweep={"sps": {"length": ["heuristic"]}})).points:
        p.swept.update({name: f"rule {value}" for name, value in p.swept.items()})
    assert pareto.draw(found)
    records = synthetic.records([synthetic.sps], prompts=4)
    manifest["config"]["effective"]["methods"] = [{"name": "sps", "label": "sps"}]
    assert pareto.draw(find_sweep(summarise(records, manifest), manifest))
