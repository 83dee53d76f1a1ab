"""Runs of shapes: costs without weights, acceptance that is imposed, and *synthetic* wherever a
figure of theirs stands."""

import csv
import io
import json
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.store.run_dir import RunDir

PAIR = ("--target", "shape:tiny-4m", "--draft", "shape:tiny-1m", "--allow-noise", "--threads", "1")
SMALL = ("-m", "sps", "--limit", "2", "--max-new-tokens", "24")
DRAWN = "weights of shape:tiny-4m and shape:tiny-1m drawn at random"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
        monkeypatch.setenv(name, "")

    def call(*args):
        return (app._run(list(args)), *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a pair of shapes, with acceptance imposed."""
    folder = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SPECBENCH_CACHE", str(folder / "cache"))
        code = app._run(["run", *PAIR, *SMALL, "--acceptance", "0.7", "--out", "here"])
    assert code == 0
    return folder / "here"


def test_every_record_says_what_is_made_up_and_acceptance_is_as_imposed(made):
    run = RunDir.open(made)
    records = list(run.records())
    assert {record.synthetic for record in records} == {f"{DRAWN}, acceptance 0.7 imposed"}
    assert run.manifest["synthetic"] == f"{DRAWN}, acceptance 0.7 imposed"
    assert {record.verdict.kind for record in records} == {"reference", "identical"}
    assert {record.finish for record in records} == {"length"}
    steps = [record.steps for record in records if record.label == "sps"]
    tested, accepted = (sum(map(sum, (getattr(s, of) for s in steps))) for of in
                        ("tested", "accepted"))  # fmt: skip
    assert accepted / tested == pytest.approx(0.7, abs=4 * (0.21 / tested) ** 0.5)


def test_tables_and_reports_say_it(run, made, monkeypatch):
    code, out, _ = run("report", str(made))
    assert code == 0
    assert "SYNTHETIC  mini" in out
    assert f"synthetic: {DRAWN}, acceptance 0.7 imposed" in " ".join(out.split())
    code, out, err = run("report", str(made), "--format", "tsv")
    rows = list(csv.DictReader(io.StringIO(out), delimiter="\t"))
    assert code == 0, err
    assert {row["synthetic"] for row in rows} == {f"{DRAWN}, acceptance 0.7 imposed"}
    assert f"synthetic: {DRAWN}, acceptance 0.7 imposed" in err
    code, _, err = run("report", str(made), "--to", "html,md,csv,latex", "--out", "told")
    assert code == 0, err
    for suffix in ("html", "md", "csv", "tex"):
        said = [path.read_text() for path in Path("told").rglob(f"*.{suffix}")]
        assert any("drawn at random" in text for text in said), suffix


def test_no_real_row_is_ranked_beside_it(run, made):
    again = ("--target", "embedded-1m", "--allow-noise", "--threads", "1", "-m", "pld", "--limit",
             "2", "--max-new-tokens", "24", "--out", "real")  # fmt: skip
    assert run("run", *again)[0] == 0
    code, _, err = run("report", str(made), "real")
    assert code == 2
    assert "shape:tiny-4m" in err
    code, _, err = run("compare", str(made), "real")
    assert code == 2
    code, _, err = run("publish", str(made), "--to", "gallery")
    assert code == 2
    assert "it is synthetic" in err or "is not published" in err


def test_costs_of_shapes_are_probed_as_a_models(run, made, monkeypatch):
    from specbench_cli.measure import method_costs as probing
    from specbench_cli.measure import probe
    from specbench_cli.measure.costs import Costs
    from specbench_cli.measure.probe_rounds import ProbeGrid

    grid = ProbeGrid(contexts=(16, 64), chains=(1, 6), trees=(4,), levels=(2,))
    monkeypatch.setitem(probe.Probe.__init__.__kwdefaults__, "grid", grid)
    monkeypatch.setitem(probing.PROBED_PARAMS, "sps-tree", ({"widths": (2, 1)},))
    code, _, err = run("predict", "--probe", *PAIR, "--rounds", "1", "--out", "costs.json")
    assert code == 0, err
    assert f"synthetic: {DRAWN}" in err
    costs = Costs.load(Path("costs.json"))
    assert costs.models["target"]["label"] == "shape:tiny-4m"


def test_a_shape_that_does_not_fit_says_so_in_bytes_before_anything_is_drawn(run):
    code, _, err = run("run", "--target", "shape:llama-2-70b", "-m", "vanilla", "--limit", "1",
                       "--allow-noise", "--dtype", "bfloat16")  # fmt: skip
    assert code == 3
    assert "138 GB (137,953,296,384 bytes) of weights in bfloat16" in err


def test_acceptance_can_be_a_recorded_runs(run, made):
    records = [record for record in RunDir.open(made).records() if record.label == "sps"]
    tested, accepted = (sum(sum(getattr(r.steps, of)) for r in records)
                        for of in ("tested", "accepted"))  # fmt: skip
    assert run("run", *PAIR, *SMALL, "--acceptance", str(made), "--out", "again")[0] == 0
    again = RunDir.open(Path("again"))
    assert again.manifest["config"]["effective"]["acceptance"] == round(accepted / tested, 4)
    code, _, err = run("run", *PAIR, *SMALL, "--acceptance", "nowhere")
    assert code == 2 and "nowhere contains no run" in err


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--acceptance", "0.8"), "imposed on shapes alone, and embedded-7m"),
        ((*PAIR, "--acceptance", "1.5"), "acceptance"),
        ((*PAIR, "--acceptance", "0.5", "-m", "hf:vanilla"), "hf:vanilla decodes by what the"),
        ((*PAIR, "--acceptance", "0.5", "--temperature", "0.8"), "at temperature 0"),
        (("--target", "shape:llama-4"), "unknown shape 'llama-4'"),
    ],
)
def test_what_cannot_be_imposed_is_told(run, asked, says):
    code, out, err = run("run", *asked, "--limit", "1")
    assert (code, out) == (2, "")
    assert says in err
    assert "hint: " in err


def test_drawn_weights_alone_are_synthetic_too(run):
    asked = ("--target", "shape:tiny-moe", "-m", "pld", "--max-new-tokens", "8", "--threads", "1")
    code, out, err = run("run", *asked, "--limit", "1", "--allow-noise", "--json")
    assert code == 0, err
    done = json.loads(out.splitlines()[-1])
    assert {row["synthetic"] for row in done["summary"]} == {
        "weights of shape:tiny-moe drawn at random"
    }


def test_in_a_table_of_several_targets_each_synthetic_row_is_marked(run):
    asked = ("--targets", "shape:tiny-1m,embedded-1m", "-m", "pld", "--limit", "1", "--allow-noise",
             "--max-new-tokens", "8", "--threads", "1", "--out", "both")  # fmt: skip
    code, out, err = run("run", *asked)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    models = {row[1]: row[2] for row in rows if len(row) > 2 and row[2] in ("synthetic", "real")}
    assert models == {"shape:tiny-1m": "synthetic", "embedded-1m": "real"}
    assert "targets are not ranked" in out
    assert "synthetic: weights of shape:tiny-1m drawn at random" in out
