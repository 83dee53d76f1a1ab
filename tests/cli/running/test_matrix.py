"""`specbench run --targets` (a matrix): one run per target, resumed, reported and compared."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.commands import _running
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

COMMAND = (
    "run -m sps,pld --targets embedded-7m,embedded-1m --drafts embedded-1m --limit 2"
    " --max-new-tokens 8 --allow-noise --threads 1 --out here"
).split()
RUNS = ["embedded-7m+embedded-1m", "embedded-1m+embedded-1m"]


@pytest.fixture(scope="module")
def interrupted_matrix(call_here):
    """Interrupt a matrix after its first run, before any test resumes it.

    Return the exit code, which runs are stored, the records of the first run, and the exit
    code and table of the report.
    """
    write_report = _running.write_report

    def interrupted(folder, view):
        write_report(folder, view)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_running, "write_report", interrupted)
        code = app._run(COMMAND)
    with redirect_stdout(StringIO()) as table:
        reported = app._run(["report", "here"])
    stored = [RunDir.holds_run(Path("here") / name) for name in RUNS]
    return code, stored, Path("here", RUNS[0], "records.jsonl").read_bytes(), reported, table


@pytest.fixture(scope="module")
def resumed_matrix(interrupted_matrix):
    """Resume the interrupted matrix and return the exit code."""
    return app._run(["run", "--resume", "last"])


def test_a_resumed_matrix_keeps_its_records_and_measures_the_rest(
    interrupted_matrix, resumed_matrix, call_here, capsys
):
    code, stored, records, reported, table = interrupted_matrix
    assert (code, stored) == (130, [True, False])
    assert reported == 0 and re.search(r"(?m)^ sps ", table.getvalue())
    assert resumed_matrix == call_here(capsys, "run", "--resume", "here")[0] == 0
    assert Path("here", RUNS[0], "records.jsonl").read_bytes() == records
    assert RunDir.open(Path("here", RUNS[1])).manifest["status"] == "finished"
    assert [file.name for file in Path("here").glob(".*")] == [".specbench.json"]


def test_each_target_is_an_ordinary_run_with_its_own_vanilla(resumed_matrix):
    assert resumed_matrix == 0
    for name in RUNS:
        run = RunDir.open(Path("here") / name)
        assert run.manifest["models"]["target"]["label"] == name.partition("+")[0]
        assert {record.label for record in run.records()} == {"vanilla", "sps", "pld"}
        assert {record.verdict.kind for record in run.records() if record.label == "vanilla"} == {
            "reference"
        }


def test_last_names_the_matrix_and_its_report_is_one_table(resumed_matrix, call_here, capsys):
    code, out, _ = call_here(capsys, "report", "last", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    combined = {(row["method"], row["target_model"]) for row in rows if row["family"] == "all"}
    assert combined == {
        (f"{method} @{name}", name.partition("+")[0])
        for method in ("vanilla", "sps", "pld")
        for name in RUNS
    }
    assert "## By target" in Path("here/report.md").read_text()
    assert call_here(capsys, "report", "here", "--to", "html,latex,csv")[0] == 0
    assert Path("here/report/report.html").is_file()
    runs_table = call_here(capsys, "list", "runs")[1].splitlines()
    assert {line.split("\t")[0].rpartition("/")[2] for line in runs_table} >= set(RUNS)


def test_a_matrix_is_compared_with_a_matrix_target_by_target(resumed_matrix, call_here, capsys):
    code, out, _ = call_here(capsys, "compare", "here", "last", "--json")
    assert (code, len(out.splitlines())) == (0, 2)
    code, _, err = call_here(capsys, "compare", "here", str(Path("here") / RUNS[0]))
    assert code == 2 and "only one of here and" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("report here --prompt mini/qa-000", "contains several runs, one for each target"),
        (f"report here here/{RUNS[0]}", "cannot be combined with other runs"),
        ("export here --inspect --out there", "contains several runs"),
        ("publish here --to there", "contains several runs"),
        ("predict here", "contains several runs"),
    ],
)
def test_a_command_for_one_run_refuses_a_matrix(resumed_matrix, call_here, capsys, args, message):
    code, out, err = call_here(capsys, *args.split())
    assert (code, out) == (2, "")
    assert message in err


def test_json_ends_with_all_methods_and_the_run_folders(call_here, capsys):
    command = "run -m pld --targets embedded-7m,embedded-1m --limit 1 --max-new-tokens 4"
    noisy = "--allow-noise --threads 1 --out there --json"
    code, out, _ = call_here(capsys, *command.split(), *noisy.split())
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["target"] for event in events if event["event"] == "plan"] == [
        "embedded-7m",
        "embedded-1m",
    ]
    assert events[-1]["event"] == "done"
    assert events[-1]["runs"] == ["there/embedded-7m", "there/embedded-1m"]
    assert {row["target_model"] for row in events[-1]["summary"]} == {"embedded-7m", "embedded-1m"}


def test_nothing_is_measured_if_one_target_cannot_be_planned(call_here, capsys):
    code, _, err = call_here(capsys, *"run -m pld --targets embedded-7m,gone --out never".split())
    assert code == 2 and "unknown model 'gone'" in err
    assert not Path("never").exists()
