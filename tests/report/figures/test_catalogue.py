"""A run's figures: those that it has data for, each with a caption, the same bytes every time."""

from __future__ import annotations

import matplotlib as mpl
import pytest

from specbench_cli.report.figures import CAPTIONS, write_figures
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import Prompt, RunDir


@pytest.fixture
def reading(synthetic, manifest, tmp_path):
    """A run of few methods on disk, read."""

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


def test_run_has_the_figures_that_it_has_data_for_and_the_same_bytes_twice(
    reading, synthetic, tmp_path
):
    before = dict(mpl.rcParams)
    found = reading(synthetic.sps, synthetic.hf_vanilla)
    first, second = (write_figures(found, tmp_path / place, paper=True) for place in "ab")
    names = [file.stem for file in first if file.suffix == ".png"]
    rare = ("targets", "pareto", "frontier", "lengths", "load", "seen")
    assert names == [name for name in CAPTIONS if name not in rare]
    for form in (".svg", ".pdf"):
        assert [file.stem for file in first if file.suffix == form] == names
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert dict(mpl.rcParams) == before, "the style of the caller is left alone"


def test_methods_that_learn_over_the_run_are_drawn_along_it(reading, synthetic, manifest, tmp_path):
    manifest["rows"] = [{"label": "vanilla"}, {"label": "sps", "state_scope": "run"}]
    names = {file.stem for file in write_figures(reading(synthetic.sps), tmp_path / "figures")}
    assert "seen" in names


def test_vanilla_alone_has_few_figures_and_no_error(reading, tmp_path):
    files = write_figures(reading(), tmp_path / "figures")
    assert {file.stem for file in files} == {"speedup", "lanes"}


def test_a_page_has_pngs_of_its_heavy_figures_alone(reading, synthetic, tmp_path):
    found = reading(synthetic.sps)

    def written(heavy):
        return write_figures(found, tmp_path / str(heavy), max_svg_bytes=heavy)

    sizes = {file.stem: file.stat().st_size for file in written(0) if file.suffix == ".svg"}
    heavy = sorted(sizes.values())[-2]
    drawn = {file.stem for file in written(heavy) if file.suffix == ".png"}
    assert drawn == {name for name, size in sizes.items() if size > heavy}
    assert len(drawn) == 1
