"""Tests of runs of model shapes, with random weights and imposed acceptance.

Their figures are marked as synthetic in every table and report.
"""

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
def synthetic_run(tmp_path_factory):
    """The folder of a run of two model shapes with imposed acceptance."""
    folder = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SPECBENCH_CACHE", str(folder / "cache"))
        code = app._run(["run", *PAIR, *SMALL, "--acceptance", "0.7", "--out", "here"])
    assert code == 0
    return folder / "here"


def test_every_record_is_marked_synthetic_and_has_the_imposed_acceptance(synthetic_run):
    run = RunDir.open(synthetic_run)
    records = list(run.records())
    assert {record.synthetic for record in records} == {f"{DRAWN}, acceptance 0.7 imposed"}
    assert run.manifest["synthetic"] == f"{DRAWN}, acceptance 0.7 imposed"
    assert {record.verdict.kind for record in records} == {"reference", "identical"}
    assert {record.finish for record in records} == {"length"}
    steps = [record.steps for record in records if record.label == "sps"]
    tested, accepted = (sum(map(sum, (getattr(s, counter) for s in steps))) for counter in
                        ("tested", "accepted"))  # fmt: skip
    assert accepted / tested == pytest.approx(0.7, abs=4 * (0.21 / tested) ** 0.5)


def test_tables_and_reports_are_marked_synthetic(run, synthetic_run, monkeypatch):
    code, out, _ = run("report", str(synthetic_run))
    assert code == 0
    assert "SYNTHETIC  mini" in out
    assert f"synthetic: {DRAWN}, acceptance 0.7 imposed" in " ".join(out.split())
    code, out, err = run("report", str(synthetic_run), "--format", "tsv")
    rows = list(csv.DictReader(io.StringIO(out), delimiter="\t"))
    assert code == 0, err
    assert {row["synthetic"] for row in rows} == {f"{DRAWN}, acceptance 0.7 imposed"}
    assert f"synthetic: {DRAWN}, acceptance 0.7 imposed" in err
    code, _, err = run(
        "report", str(synthetic_run), "--to", "html,md,csv,latex", "--out", "formats"
    )
    assert code == 0, err
    for suffix in ("html", "md", "csv", "tex"):
        pages = [path.read_text() for path in Path("formats").rglob(f"*.{suffix}")]
        assert any("drawn at random" in text for text in pages), suffix


def test_synthetic_and_real_runs_are_not_ranked_together(run, synthetic_run):
    real_run = ("--target", "embedded-1m", "--allow-noise", "--threads", "1", "-m", "pld",
                "--limit", "2", "--max-new-tokens", "24", "--out", "real")  # fmt: skip
    assert run("run", *real_run)[0] == 0
    code, _, err = run("report", str(synthetic_run), "real")
    assert code == 2
    assert "shape:tiny-4m" in err
    code, _, err = run("compare", str(synthetic_run), "real")
    assert code == 2
    code, _, err = run("publish", str(synthetic_run), "--to", "gallery")
    assert code == 2
    assert "it is synthetic" in err or "is not published" in err


def test_costs_of_shapes_are_probed_like_those_of_a_model(run, synthetic_run, monkeypatch):
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


def test_a_shape_that_does_not_fit_is_rejected_with_its_bytes(run):
    code, _, err = run("run", "--target", "shape:llama-2-70b", "-m", "vanilla", "--limit", "1",
                       "--allow-noise", "--dtype", "bfloat16")  # fmt: skip
    assert code == 3
    assert "138 GB (137,953,296,384 bytes) of weights in bfloat16" in err


def test_acceptance_can_come_from_a_recorded_run(run, synthetic_run):
    records = [record for record in RunDir.open(synthetic_run).records() if record.label == "sps"]
    tested, accepted = (sum(sum(getattr(r.steps, counter)) for r in records)
                        for counter in ("tested", "accepted"))  # fmt: skip
    assert run("run", *PAIR, *SMALL, "--acceptance", str(synthetic_run), "--out", "again")[0] == 0
    manifest = RunDir.open(Path("again")).manifest
    assert manifest["config"]["effective"]["acceptance"] == round(accepted / tested, 4)
    code, _, err = run("run", *PAIR, *SMALL, "--acceptance", "nowhere")
    assert code == 2 and "nowhere contains no run" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--acceptance", "0.8"), "--acceptance needs models with random weights (shapes)"),
        ((*PAIR, "--acceptance", "1.5"), "acceptance"),
        (
            (*PAIR, "--acceptance", "0.5", "-m", "hf:vanilla"),
            "--acceptance cannot be combined with methods of other programs (hf:vanilla)",
        ),
        (
            (*PAIR, "--acceptance", "0.5", "--temperature", "0.8"),
            "--acceptance needs temperature 0",
        ),
        (("--target", "shape:llama-4"), "unknown shape 'llama-4'"),
    ],
)
def test_invalid_acceptance_options_are_rejected(run, options, message):
    code, out, err = run("run", *options, "--limit", "1")
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err


def test_random_weights_alone_are_marked_synthetic(run):
    options = ("--target", "shape:tiny-moe", "-m", "pld", "--max-new-tokens", "8", "--threads", "1")
    code, out, err = run("run", *options, "--limit", "1", "--allow-noise", "--json")
    assert code == 0, err
    done = json.loads(out.splitlines()[-1])
    assert {row["synthetic"] for row in done["summary"]} == {
        "weights of shape:tiny-moe drawn at random"
    }


def test_synthetic_methods_are_marked_in_a_table_of_several_targets(run):
    options = ("--targets", "shape:tiny-1m,embedded-1m", "-m", "pld", "--limit", "1",
               "--allow-noise", "--max-new-tokens", "8", "--threads", "1",
               "--out", "both")  # fmt: skip
    code, out, err = run("run", *options)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    models = {row[1]: row[2] for row in rows if len(row) > 2 and row[2] in ("synthetic", "real")}
    assert models == {"shape:tiny-1m": "synthetic", "embedded-1m": "real"}
    assert "targets are not ranked" in out
    assert "synthetic: weights of shape:tiny-1m drawn at random" in out
