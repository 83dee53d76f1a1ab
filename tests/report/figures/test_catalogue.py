"""Tests of `write_figures`: which figures a run gets, and that their bytes are reproducible."""

from __future__ import annotations

import matplotlib as mpl
import pytest

from specbench_cli.report.figures import CAPTIONS, write_figures
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import Prompt, RunDir


@pytest.fixture
def reading(synthetic, manifest, tmp_path):
    """Return a function that writes a run of these methods and reads its report data."""

    def make(*fakes):
        run = RunDir.create(tmp_path / "run", manifest)
        records = synthetic.records([synthetic.vanilla, *fakes], prompts=12)
        run.append(records)
        run.append_prompts(
            Prompt(
                r.prompt_id, r.cluster, "mini", r.family, r.category, 1, "?", [1] * (30 + 20 * i)
            )
            for i, r in enumerate(r for r in records if r.label == "vanilla")
        )
        return read_report_data(run)

    return make


def test_run_has_the_figures_it_has_data_for_with_reproducible_bytes(reading, synthetic, tmp_path):
    before = dict(mpl.rcParams)
    found = reading(synthetic.sps, synthetic.hf_vanilla)
    first, second = (write_figures(found, tmp_path / place, paper=True) for place in "ab")
    names = [file.stem for file in first if file.suffix == ".png"]
    conditional = ("targets", "pareto", "frontier", "lengths", "load", "seen")
    assert names == [name for name in CAPTIONS if name not in conditional]
    for form in (".svg", ".pdf"):
        assert [file.stem for file in first if file.suffix == form] == names
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert dict(mpl.rcParams) == before, "the style of the caller is left alone"


def test_methods_that_learn_over_the_run_have_a_figure(reading, synthetic, manifest, tmp_path):
    manifest["rows"] = [{"label": "vanilla"}, {"label": "sps", "state_scope": "run"}]
    names = {file.stem for file in write_figures(reading(synthetic.sps), tmp_path / "figures")}
    assert "seen" in names


def test_run_with_only_vanilla_has_two_figures(reading, tmp_path):
    files = write_figures(reading(), tmp_path / "figures")
    assert {file.stem for file in files} == {"speedup", "lanes"}


def test_only_figures_above_the_size_limit_are_png(reading, synthetic, tmp_path):
    found = reading(synthetic.sps)

    def write_with_limit(heavy):
        return write_figures(found, tmp_path / str(heavy), max_svg_bytes=heavy)

    sizes = {
        file.stem: file.stat().st_size for file in write_with_limit(0) if file.suffix == ".svg"
    }
    heavy = sorted(sizes.values())[-2]
    png_names = {file.stem for file in write_with_limit(heavy) if file.suffix == ".png"}
    assert png_names == {name for name, size in sizes.items() if size > heavy}
    assert len(png_names) == 1
