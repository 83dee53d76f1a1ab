"""Sweeps and tuning from the command line: documented examples run, wrong options are errors."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.commands.run import EPILOG, expand_tune
from specbench_cli.report import figures as drawn
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(
    {
        line.partition("  #")[0].strip()
        for text in ((ROOT / "docs/how-to/sweeps.md").read_text(encoding="utf-8"), EPILOG)
        for line in re.findall(r"^specbench run .*--(?:sweep|tune)\b.*$", text, re.M)
    }
)
TINY = "--category qa --limit 3 --max-new-tokens 2 --threads 1 --allow-noise --out here"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch, figures):
    """Return a function that runs a command in an empty folder: exit code, stdout, stderr.

    Of all figures, only the sweep's is drawn.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        drawn, "FIGURES", [figure for figure in drawn.FIGURES if figure.name == "pareto"]
    )

    def call(command):
        code = app._run(shlex.split(command))
        return (code, *capsys.readouterr())

    return call


def test_documentation_has_examples_of_both():
    assert any("--sweep" in example for example in EXAMPLES)
    assert any("--tune" in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_the_documentation_runs(run, example):
    code, _, err = run(f"{example.removeprefix('specbench ')} {TINY}")
    assert code == 0, err
    run_dir = RunDir.open(Path("here"))
    config = run_dir.manifest["config"]["effective"]
    sources = {row["label"]: row["source"] for row in run_dir.manifest["rows"]}
    assert {record.label for record in run_dir.records()} == set(sources)
    report = Path("here", "report.md").read_text()
    if config["tune"]:
        assert any(source.startswith("tuned(") for source in sources.values())
        assert "## Tuning" in report
    else:
        with Path("here", "figures", "pareto.csv").open() as file:
            assert [row["label"] for row in csv.DictReader(file)] == list(sources)
        assert "## Sweep" in report
        assert Path("here", "figures", "pareto.png").is_file()


def test_the_plan_of_a_sweep_has_one_method_per_value(run):
    code, out, err = run("run --sweep sps.length=1:3:1,heuristic -m sps,pld --limit 2 --dry-run")
    assert (code, err) == (0, "")
    rows = dict(line.split("\t") for line in out.splitlines())["methods"].split("; ")
    assert [row.partition(" max")[0] for row in rows[:-1]] == [
        "vanilla", "sps length=1", "sps length=2", "sps length=3", "sps length=heuristic"
    ]  # fmt: skip


def test_the_plan_of_a_tuned_run_has_its_budget_and_questions(run):
    _, out, _ = run("run -m sps,pld --tune 4 --limit 12 --dry-run")
    tuning = dict(line.split("\t") for line in out.splitlines())["tuning"]
    assert tuning.startswith(
        "by time, development 6, held_out 6, candidates vanilla 1, sps 4, pld 4"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--tune"], ["run", "--tune", "8"]),
        (["run", "--tune", "--limit", "3"], ["run", "--tune", "8", "--limit", "3"]),
        (["run", "--tune", "4", "-m", "sps"], ["run", "--tune", "4", "-m", "sps"]),
        (["run", "--tune=4"], ["run", "--tune=4"]),
    ],
)
def test_tune_alone_means_eight_candidates(args, words):
    assert expand_tune(args) == words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sweep spss.length=3", "there is no method 'spss'; did you mean 'sps'?"),
        ("--sweep sps.lenght=3", "sps.lenght is not known; did you mean 'length'?"),
        ("--sweep pld.length=0:3:1", "pld.length must be at least 1, got 0"),
        ("--sweep pld.rule=author,x", "pld.rule must be one of 'author' or 'transformers'"),
        ("--sweep pld.length=1:6:0", "--sweep pld.length has step 0 in 1:6:0"),
        (
            "--sweep pld.length=6:1:1",
            "6:1:1 has a step in the wrong direction; use 1:6:1 or 6:1:-1",
        ),
        ("--sweep pld.length=1:900:1", "has 900 values in 1:900:1, at most 64 are allowed"),
        ("--sweep pld.length=1:6:1 --tune 4", "the sweep of pld has 6 combinations"),
        ("--tune --limit 1", "1 are too few, at least one family must have two"),
        ("--tune-by forwards", "tune_by 'forwards' needs --tune; add --tune 8"),
    ],
)
def test_a_wrong_sweep_or_tuning_option_fails_and_leaves_no_folder(run, tmp_path, options, message):
    code, out, err = run(f"run {options}")
    assert (code, out) == (2, "")
    assert message in err
    assert "hint: " in err
    assert not list(tmp_path.iterdir())
