"""The figure of a sweep has room for its words and its legend."""

from __future__ import annotations

import pytest

from specbench_cli.report.figures import pareto
from specbench_cli.summary.pareto import sweep_of
from specbench_cli.summary.summary import summarise

LENGTHS = (1, 3, 5, "heuristic")


@pytest.fixture
def sweep(synthetic, manifest):
    """A swept method, one row of it a bound, beside two that are not swept."""

    def make(words=(), peers=True):
        swept = [
            synthetic.Fake(f"sps length={value}", "sps", 3 + at, 0.7, 1.2, 0.12)
            for at, value in enumerate(LENGTHS)
        ]
        fakes = [synthetic.vanilla, *swept, synthetic.pld, *[synthetic.hf_vanilla] * peers]
        records = synthetic.records(fakes, prompts=12)
        for record in records:
            if record.method == "sps":
                value = record.label.partition("=")[2]
                record.params.effective["length"] = int(value) if value.isdigit() else value
        manifest["upper_bounds"] = ["sps length=5"]
        manifest["config"]["effective"] |= {
            "sweep": {"sps": {"length": list(words or LENGTHS)}},
            "methods": [{"name": fake.method or fake.label, "label": fake.label} for fake in fakes],
        }
        return sweep_of(summarise(records, manifest, resamples=199), manifest)

    return make


def test_legend_lies_below_everything_and_names_bounds(sweep, check_legible):
    # vanilla, sps, its bound, pld and the front: one more than a row of the legend holds
    figure = pareto.draw(sweep(peers=False))
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5
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
    for p in (found := sweep(words=["heuristic"])).points:
        p.swept.update({name: f"rule {value}" for name, value in p.swept.items()})
    assert pareto.draw(found)
    records = synthetic.records([synthetic.sps], prompts=4)
    manifest["config"]["effective"]["methods"] = [{"name": "sps", "label": "sps"}]
    assert pareto.draw(sweep_of(summarise(records, manifest), manifest))
