"""The figure is the same bytes for the same records, and a column wide."""

from __future__ import annotations

import struct

import pytest

from specbench_cli.report.figure import write_figure
from specbench_cli.report.summary import summarise


@pytest.fixture
def summary(synthetic, manifest):
    lossy = synthetic.Fake("relaxed", length=5, alpha=0.95, guarantee="quality_only")
    bad = synthetic.Fake("bad", length=5, alpha=0.9, verdict="mismatch")
    fakes = [synthetic.vanilla, synthetic.sps, synthetic.hf_vanilla, lossy, bad]
    return summarise(synthetic.records(fakes), manifest | {"aa_noise": 0.02}, resamples=499)


def test_figure_is_deterministic_svg_and_png(summary, tmp_path):
    first = write_figure(summary, tmp_path / "a")
    second = write_figure(summary, tmp_path / "b")
    assert [file.name for file in first] == ["speedup.svg", "speedup.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_figure_is_84_mm_wide_at_300_dpi(summary, tmp_path):
    png = write_figure(summary, tmp_path)[1].read_bytes()
    width, _ = struct.unpack(">II", png[16:24])
    assert width == pytest.approx(84 / 25.4 * 300, abs=1)


def test_figure_does_not_touch_the_style_of_others(summary, tmp_path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    write_figure(summary, tmp_path)
    assert dict(mpl.rcParams) == before


def test_one_family_and_no_noise_floor_make_a_figure_too(synthetic, manifest, tmp_path):
    records = [r for r in synthetic.records(prompts=24) if r.family == "qa"]
    assert write_figure(summarise(records, manifest, resamples=499), tmp_path)


def test_run_without_speedups_has_no_figure(synthetic, manifest, tmp_path):
    summary = summarise(synthetic.records([synthetic.sps], prompts=2), manifest)
    assert write_figure(summary, tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()
