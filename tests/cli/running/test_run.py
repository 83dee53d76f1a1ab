"""`specbench run` from the command line to its result, with a small model pair."""

import csv
import io
import json
import shlex
from pathlib import Path

import pytest
from typer import rich_utils
from typer.main import get_command

from specbench_cli import app
from specbench_cli.commands import _progress
from specbench_cli.commands.report import EXAMPLES as REPORTS
from specbench_cli.commands.run import EXAMPLES
from specbench_cli.config.load import DEFAULT_METHODS
from specbench_cli.config.profile import PROFILES
from specbench_cli.config.run import RunConfig
from specbench_cli.measure import machine_lock
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

ROOT = Path(__file__).parents[3]
SMALL = ["-m", "sps", "--limit", "2", "--max-new-tokens", "8", "--allow-noise", "--threads", "1"]


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder.

    The function returns exit code, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "SPECBENCH_DEBUG"):
        monkeypatch.setenv(name, "")

    def call(*args):
        code = app._run(list(args))
        return (code, *capsys.readouterr())

    return call


def plan_of(out):
    return dict(line.split("\t") for line in out.splitlines())


def events_of(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_the_help_can_be_planned(run, example):
    program, *args = shlex.split(example)
    code, out, err = run(*args, "--dry-run")
    assert (program, code, err) == ("specbench", 0, "")
    assert int(plan_of(out)["cells"]) > 0


def test_a_run_without_arguments_uses_the_short_settings(run, tmp_path):
    _, out, _ = run("run", "--dry-run")
    plan = plan_of(out)
    labels = [row.split()[0] for row in plan["methods"].split("; ")]
    assert labels == ["vanilla", "sps", "pld", "hf:vanilla", "hf:assisted"]
    assert plan["tasks"].startswith("mini: 12 questions")
    assert (plan["target"], plan["draft"]) == ("embedded-7m", "embedded-1m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["smoke", "ci"])
def test_the_plan_of_a_profile_includes_its_cost(run, name, tmp_path):
    code, out, err = run("run", "--profile", name, "--dry-run")
    plan = plan_of(out)
    assert (code, err) == (0, "")
    assert plan["tasks"] == "mini: 6 questions, 7 prompts"
    assert int(plan["most_tokens"]) > 0
    assert not list(tmp_path.iterdir())


def test_a_machine_lock_shared_with_no_other_run_warns(run, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.01)
    code, _, err = run("run", *SMALL, "--in-turn", "turns", "--out", "here")
    machine_lock.get_machine_lock(tmp_path / "turns").close()
    machine_lock.get_machine_lock.cache_clear()
    assert code == 0
    assert err.count("no other run measures in turn with this one") == 1
    assert str(tmp_path) not in (tmp_path / "here/manifest.json").read_text()


def test_an_invalid_machine_lock_file_is_exit_code_2(run, tmp_path):
    (tmp_path / "turns").mkdir()
    code, out, err = run("run", *SMALL, "--in-turn", "turns", "--out", "here")
    assert (code, out) == (2, "")
    assert "--in-turn" in err and "choose a file that does not exist" in err
    assert not (tmp_path / "here").exists()


def test_every_config_field_is_an_option_with_its_default():
    command = get_command(app._select_commands(["run"])).commands["run"]
    defaults = {param.name: param.show_default for param in command.params}
    assert RunConfig.model_fields.keys() <= defaults.keys()
    plain = {
        name: field.default
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    }
    assert {name: defaults[name] for name in plain} == {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in plain.items()
    }
    assert defaults["methods"] == ", ".join(DEFAULT_METHODS)
    assert all(defaults.values())


def test_the_help_fits_80_columns_and_shows_no_types_of_flags(run, monkeypatch):
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    _, out, _ = run("run", "-h")
    assert max(map(len, out.splitlines())) <= 80
    assert "<bool>" not in out
    panels = [line.split()[1:-1] for line in out.splitlines() if line.startswith("╭")]
    assert [" ".join(words).rstrip(" ─") for words in panels] == [
        "Options", "What to run", "Decoding", "Measuring", "Output"
    ]  # fmt: skip


def test_profiles_are_described_by_the_help(run):
    _, out, _ = run("run", "--help")
    text = " ".join(out.split())
    assert all(f"{name}: {about}." in text for name, about in PROFILES.items())


def test_unknown_profile_is_refused_with_the_nearest_one(run):
    code, _, err = run("run", "--profile", "smok", "--dry-run")
    assert code == 2
    assert "unknown profile 'smok'; did you mean 'smoke'?" in err


def test_name_of_the_profile_is_in_the_manifest(run):
    assert run("run", "--profile", "smoke", *SMALL, "--out", "here")[0] == 0
    manifest = RunDir.open(Path("here")).manifest
    assert manifest["config"]["effective"]["profile"] == "smoke"
    assert manifest["config_sources"]["profile"] == "--profile"
    assert manifest["config_sources"]["tasks"] == "profile smoke"


def test_a_run_with_out_is_last_and_is_listed(run):
    small_args = [
        "-m",
        "pld,sps",
        "--target",
        "embedded-1m",
        "--limit",
        "1",
        "--max-new-tokens",
        "4",
    ]
    code, out, err = run(
        "run", *small_args, "--allow-noise", "--threads", "1", "--out", "there/mine"
    )
    reason = "sps needs a draft model, and embedded-1m has no default one"
    assert code == 3, "a row could not run, and the others did"
    assert err.index(f"sps is left out, it cannot run here: {reason}") < err.index("warming up")
    assert f"left out, could not run here: sps: {reason}" in out
    assert "error: could not run on this machine, so left out: sps" in err
    assert json.loads(run("list", "runs", "--json")[1])["name"] == "there/mine"
    code, out, _ = run("report", "last")
    assert code == 0 and "pld" in out and "sps: sps needs" in out


def test_the_plan_names_methods_that_cannot_run(run):
    plan = plan_of(run("run", "--dry-run", "-m", "pld,sps", "--target", "embedded-1m")[1])
    assert plan["methods"].startswith("vanilla; pld") and "sps is left out" in plan["left_out"]


def test_with_json_the_plan_is_one_event(run):
    _, out, _ = run("run", "--dry-run", "--json", "-m", "sps", "--limit", "2")
    (event,) = events_of(out)
    assert event["event"] == "plan"
    assert event["methods"][1]["params"] == {
        "length": 5,
        "max": 20,
        "threshold": None,
        "acceptance": 0.7,
    }


def test_unknown_parameter_is_refused_before_anything_runs(run, tmp_path):
    code, _, err = run("run", "-m", "sps", "--set", "sps.lenght=7", "--dry-run")
    assert code == 2
    assert "sps.lenght is not known; did you mean 'length'?" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
def test_tsv_goes_to_stdout_and_messages_to_stderr(run):
    code, out, err = run("run", *SMALL, "--out", "here", "--format", "tsv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out), delimiter="\t"))
    assert {row["method"] for row in rows} == {"vanilla", "sps"}
    assert "in here" in err.splitlines()
    assert RunDir.open(Path("here")).manifest["status"] == "finished"
    assert Path("here", "summary.csv").is_file()
    assert Path("here", "report.md").is_file()


def test_sources_of_settings_are_in_the_manifest(run):
    Path("specbench.yaml").write_text("# mine\nseed: 3\n")
    assert run("run", *SMALL, "--out", "here")[0] == 0
    sources = RunDir.open(Path("here")).manifest["config_sources"]
    assert sources["seed"] == "specbench.yaml:2"
    assert sources["limit"] == "--limit"
    assert sources["temperature"] == "default"


@pytest.mark.smoke
def test_json_run_ends_with_done_and_its_summary(run):
    code, out, _ = run("run", *SMALL, "--json")
    events = events_of(out)
    assert code == 0
    assert [event["event"] for event in events[:2]] == ["plan", "start"]
    between = {event["event"] for event in events[2:-1]}
    assert between == {"stage", "prompt", "window", "cell"}
    done = events[-1]
    assert done["event"] == "done"
    assert {row["label"] for row in done["summary"]} == {"vanilla", "sps"}
    assert min(done["memory"][part] for part in ("weight_bytes", "state_bytes")) > 0
    assert all(row["peak_bytes"] is None or row["peak_bytes"] > 0 for row in done["summary"])
    assert len(list(RunDir.open(Path(done["run"])).records())) == events[1]["cells"]


@pytest.mark.smoke
def test_an_interrupted_run_prints_its_resume_command_and_can_be_resumed(run, monkeypatch):
    def interrupt(self, record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_progress.LogDisplay, "show_record", interrupt)
        code, out, err = run("run", *SMALL, "--out", "my run")
    assert (code, out) == (130, "")
    command = next(line for line in err.splitlines() if line.startswith("to resume: "))
    before = len(list(RunDir.open(Path("my run")).records()))
    program, *args = shlex.split(command.removeprefix("to resume: "))
    assert program == "specbench"
    code, _, err = run(*args)
    assert code == 0
    assert f"{before} of them already measured" in err
    records = list(RunDir.open(Path("my run")).records())
    assert len({record.key for record in records}) == len(records) > before


@pytest.mark.long
@pytest.mark.usefixtures(
    "shipped_pair"
)  # repeats run in processes without the fixture's small pair
def test_repeats_in_several_processes_print_one_plan_and_one_summary(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_args = [*SMALL, "--category", "qa", "--limit", "1"]
    assert app._run(["run", *small_args, "--repeats", "2", "--json", "--out", "here"]) == 0
    events = events_of(capfd.readouterr().out)
    kinds = [event["event"] for event in events]
    assert [kinds.count(kind) for kind in ("plan", "start", "done")] == [1, 1, 1]
    assert {event["pass"] for event in events if event["event"] == "cell"} == {1, 2}
    records = list(RunDir.open(Path("here")).records())
    assert len(records) == 2 * 2
    one, two = (
        [r.output_ids for r in records if r.pass_ == number and r.label == "sps"]
        for number in (1, 2)
    )
    assert one == two


def test_last_run_can_be_resumed_reported_and_listed(run):
    assert run("run", *SMALL)[0] == 0
    ((name, before),) = (
        (path.name, (path / "records.jsonl").read_bytes())
        for path in Path("results/runs").iterdir()
    )
    code, out, _ = run("run", "--resume", "last")
    assert code == 0
    assert "sps" in out
    assert Path("results/runs", name, "records.jsonl").read_bytes() == before
    assert name in run("list", "runs")[1]
    assert json.loads(run("list", "runs", name, "--json")[1])["status"] == "finished"
    example = shlex.split(REPORTS[0])
    assert example[:2] == ["specbench", "report"]
    assert run(*example[1:])[0] == 0


@pytest.mark.smoke
def test_plugin_of_readme_runs_and_is_lossless(run):
    (_, after) = (ROOT / "README.md").read_text().split("<!-- plugin -->\n```python\n")
    Path("repeat_last.py").write_text(after.split("```")[0])
    args = ["--plugin", "repeat_last.py", "--set", "repeat-last.times=2", *SMALL[2:]]
    args += ["--isolation", "none"]  # tests/test_docs.py runs one with isolation
    assert run("run", *args, "--out", "here")[0] == 0
    records = list(RunDir.open(Path("here")).records())
    assert {record.label for record in records} == {"vanilla", "repeat-last"}
    assert {record.verdict.kind for record in records} <= {"reference", "identical", "near-tie"}


def test_a_folder_that_contains_a_run_is_refused(run):
    Path("here").mkdir()
    Path("here", "manifest.json").write_text("{}")
    code, _, err = run("run", *SMALL, "--out", "here")
    assert code == 2
    assert "specbench run --resume here" in err
