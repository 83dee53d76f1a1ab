"""The figure of a sweep has room for its words and its legend."""

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


def test_legend_lies_below_everything_and_names_bounds(sweep, check_legible):
    # vanilla, sps, its bound, pld, a peer and the front: more than a row of the legend holds
    figure = pareto.draw(sweep())
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6
    assert "sps (not ranked)" in [text.get_text() for text in legend.get_texts()]
    figure.draw_without_rendering()
    top = legend.get_window_extent(renderer).y1
    assert all(axes.get_tightbbox(renderer).y0 >= top for axes in figure.axes)
    check_legible(figure)


def test_points_stand_at_their_rows_rates(sweep):
    found = sweep()
    drawn = {tuple(at) for line in pareto.draw(found).axes[0].lines for at in line.get_xydata()}
    for point in found.points:
        if point.along:
            assert (point.row.discard_rate, point.row.verification_rate) in drawn


def test_figure_is_drawn_of_words_alone_and_without_any_speedup(sweep, synthetic, manifest):
    for p in (found := sweep(sweep={"sps": {"length": ["heuristic"]}})).points:
        p.swept.update({name: f"rule {value}" for name, value in p.swept.items()})
    assert pareto.draw(found)
    records = synthetic.records([synthetic.sps], prompts=4)
    manifest["config"]["effective"]["methods"] = [{"name": "sps", "label": "sps"}]
    assert pareto.draw(find_sweep(summarise(records, manifest), manifest))
