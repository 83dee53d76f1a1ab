"""Tests of the default figure, which has one bar per method with its speedup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from specbench_cli.report.figures import speedup
from specbench_cli.summary.summary import summarise


@pytest.fixture
def summary(synthetic, manifest):
    lossy = synthetic.Fake("relaxed", length=5, alpha=0.95, guarantee="quality_only")
    bad = synthetic.Fake("bad", length=5, alpha=0.9, verdict="mismatch")
    fakes = [synthetic.vanilla, synthetic.sps, synthetic.hf_vanilla, lossy, bad]
    return summarise(synthetic.records(fakes), manifest | {"aa_noise": 0.02}, resamples=499)


def bars(figure) -> list[Rectangle]:
    (axes,) = figure.axes
    return [bar for container in axes.containers for bar in container if isinstance(bar, Rectangle)]


def test_bars_are_the_speedups_of_lossless_methods(summary):
    assert summary.lossy[0].speedup is not None
    rows = [row for row in summary.lossless if row.speedup is not None]
    assert [bar.get_width() for bar in bars(speedup.draw(summary))] == [row.speedup for row in rows]


def test_bars_of_vanilla_and_other_engines_differ(summary, check_grey):
    found = bars(speedup.draw(summary))
    rows = [row for row in summary.lossless if row.speedup is not None]
    kinds = {(row.peer, row.label == "vanilla"): bar for row, bar in zip(rows, found, strict=True)}
    check_grey([(bar.get_facecolor()[:3], bar.get_hatch()) for bar in kinds.values()])


def test_grey_band_is_the_noise_floor(summary):
    (axes,) = speedup.draw(summary).axes
    assert not any(
        isinstance(each, PolyCollection) and each.get_hatch() for each in axes.collections
    )
    band = axes.patches[0]
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((0.98, 1.02))


def test_one_family_and_no_noise_floor_make_a_figure_too(synthetic, manifest):
    records = [r for r in synthetic.records(prompts=24) if r.family == "qa"]
    assert speedup.draw(summarise(records, manifest, resamples=499))


def test_run_without_speedups_has_no_figure(synthetic, manifest):
    summary = summarise(synthetic.records([synthetic.sps], prompts=2), manifest)
    assert speedup.draw(summary) is None


def test_an_interval_that_extends_beyond_the_axes_ends_in_an_arrowhead(summary):
    def heads(made):
        (axes,) = speedup.draw(made).axes
        edge = axes.get_xlim()[1]
        return [at for each in axes.collections for at in each.get_offsets() if at[0] == edge]

    assert not heads(summary)
    wide = [replace(row, speedup_high=100) if row.peer else row for row in summary.lossless]
    assert len(heads(replace(summary, lossless=tuple(wide)))) == 1


def test_the_figure_of_a_bar_does_not_overlap_its_base(summary):
    (axes,) = speedup.draw(summary).axes
    assert {text.xy[0] for text in axes.texts if text.get_text().endswith("x")} == {0}
    rows = {row.label: row for row in summary.lossless}
    rows["sps"] = replace(rows["sps"], speedup=0.05, speedup_low=0.04, speedup_high=0.3)
    (axes,) = speedup.draw(replace(summary, lossless=tuple(rows.values()))).axes
    (word,) = (text for text in axes.texts if text.get_text() == "0.05x")
    families = [row for of in summary.families.values() for row in of if row.label == "sps"]
    assert word.xy[0] > max(0.3, *(row.speedup for row in families))


@pytest.mark.parametrize(("high", "beyond"), [(2.0, True), (100.0, False)])
def test_the_figure_of_a_bar_does_not_overlap_the_labels(summary, high, beyond):
    rows = {row.label: row for row in summary.lossless}
    rows["sps"] = replace(rows["sps"], speedup=1.01, speedup_low=0.04, speedup_high=high)
    figure = speedup.draw(replace(summary, lossless=tuple(rows.values())))
    (axes,) = figure.axes
    (word,) = (text for text in axes.texts if text.get_text() == "1.01x")
    assert word.get_window_extent(figure.canvas.get_renderer()).x1 <= axes.bbox.x1
    assert bool(word.xy[0] > high) is beyond
