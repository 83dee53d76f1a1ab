"""`import specbench_cli as sb`: the command's engine, records, settings and errors from Python."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch

import specbench_cli as sb
from specbench_cli import app, registry
from specbench_cli.commands import _progress
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.metrics import MethodSummary

pytestmark = pytest.mark.usefixtures("small_pair")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/python.md").read_text(encoding="utf-8")
SMALL = {"limit": 2, "max_new_tokens": 6, "allow_noise": True, "threads": 1}


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two methods, with a parameter and a family."""
    out = tmp_path_factory.mktemp("runs") / "first"
    settings = {"set": {"sps": {"length": 3}}, "category": ["qa"], "progress": False}
    return sb.run(methods=["sps", "pld"], tasks="mini", out=out, **settings, **SMALL)


@pytest.fixture
def notebook(monkeypatch):
    """A kernel's IPython; returns what is displayed."""
    shown = []
    kernel = SimpleNamespace(kernel=object())
    display = SimpleNamespace(display=lambda forms, raw: shown.append(forms))
    ipython = SimpleNamespace(get_ipython=lambda: kernel, version_info=(9, 0))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_importing_the_package_imports_nothing_heavy_and_still_names_all_of_it():
    heavy = "torch transformers numpy pandas matplotlib scipy pydantic rich typer".split()
    code = (
        "import json, sys, specbench_cli as sb;"
        f"print(json.dumps([[m for m in {heavy} if m in sys.modules], len(sys.modules), dir(sb)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, check=True
    )
    imported, modules, names = json.loads(done.stdout)
    assert (imported, set(sb.__all__) - set(names)) == ([], set())
    assert modules < 100
    with pytest.raises(AttributeError, match="'specbench_cli' has no attribute 'runn'"):
        sb.runn  # noqa: B018


def test_names_stay_what_they_are_once_the_rooms_are_imported():
    """A submodule of the same name would take an attribute's place."""
    importlib.import_module("specbench_cli.app")
    importlib.import_module("specbench_cli.comparison.compare")
    assert all(inspect.isroutine(getattr(sb, name)) for name in ("run", "load", "compare"))
    assert not [name for name in sb.__all__ if (ROOT / "specbench_cli" / name).exists()]


def test_a_run_is_the_command_s_run(run, tmp_path):
    """The same configuration, records but for times, and files."""
    line = "run -m sps,pld -t mini --category qa --set sps.length=3 --limit 2 --max-new-tokens 6"
    code = app._run([*line.split(), "--allow-noise", "--threads", "1", "--out", "second"])
    second = RunDir.open(tmp_path / "second")
    assert code == run.exit_code == ExitCode.OK
    ours, theirs = (each.manifest["config"] for each in (run, second))
    assert ours["effective"] == theirs["effective"]
    assert run.manifest["config_sources"]["limit"] == "run()"
    files = {path.name for path in run.path.iterdir()}
    assert files == {path.name for path in second.path.iterdir()} > {"records.parquet"}
    first = RunDir.open(run.path).records()
    for own, other in zip(first, second.records(), strict=True):
        assert (own.label, own.output_ids, own.steps, own.params.effective, own.verdict) == (
            other.label, other.output_ids, other.steps, other.params.effective, other.verdict,
        )  # fmt: skip


@pytest.mark.parametrize(("spent", "counted"), [(1.5, 1.5), (4000.0, 3.0)])
def test_time_left_counts_the_report_by_the_start_of_the_program(monkeypatch, spent, counted):
    """A notebook's kernel has computed for an hour when it asks."""
    seen = []
    monkeypatch.setattr("time.process_time", lambda: spent)
    monkeypatch.setattr(
        _progress,
        "make_progress",
        lambda **given: seen.append(given) or _progress.ProgressDisplay(),
    )
    with pytest.raises(UsageError, match="positions"):
        sb.run(methods="pld", limit=1, max_new_tokens=10**9)
    assert seen == [{"json": False, "start_s": counted}]


def test_df_has_a_row_a_record_and_is_the_parquet_file(run):
    records = list(RunDir.open(run.path).records())
    assert len(run.df) == len(records) == 6
    assert list(run.df["ns_total"]) == [record.ns.total for record in records]
    pandas.testing.assert_frame_equal(run.df, pandas.read_parquet(run.path / "records.parquet"))


def test_summary_has_a_row_a_method_with_intervals_and_families_one_a_family(run):
    assert set(run.summary.index) == {"vanilla", "sps", "pld"}
    assert set(run.summary.columns) == {*MethodSummary.__dataclass_fields__} - {"label"}
    for name in ("speedup", "speedup_low", "speedup_high", "mat"):
        assert run.summary[name].dtype == float
    assert run.summary.loc["sps", "mat"] == pytest.approx(
        run.df[run.df.label == "sps"].steps_committed.map(sum).sum()
        / run.df[run.df.label == "sps"].steps_committed.map(len).sum()
    )
    assert set(run.families.index) == {("qa", label) for label in run.summary.index}


def test_load_reads_what_was_run(run, tmp_path, monkeypatch):
    again = sb.load(run.path)
    pandas.testing.assert_frame_equal(again.summary, run.summary)
    assert (repr(again), str(again)) == (repr(run), str(run))
    with pytest.raises(UsageError, match=r"there is no run in results/runs"):
        sb.load()
    with pytest.raises(UsageError, match="nowhere"):
        sb.load("nowhere")


def test_what_is_no_name_of_a_run_is_refused(run):
    with pytest.raises(UsageError, match=r"load\(\): run must be a name or a path, got 7"):
        sb.load(7)
    with pytest.raises(UsageError, match=r"compare\(\): new must be a name or a path, got None"):
        sb.compare(run, None)


def test_outside_of_a_notebook_show_prints_the_table(run, capsys):
    run.show()
    out, err = capsys.readouterr()
    assert out == f"{run}\n"
    assert "speedup  95% CI" in out
    assert err == ""


def test_in_a_notebook_show_is_the_report_in_a_frame_of_its_own(run, notebook):
    run.show()
    (forms,) = notebook
    assert forms["text/plain"] == str(run)
    frame = forms["text/html"]
    assert frame.startswith('<div><iframe sandbox="allow-scripts"')
    assert "&lt;!doctype html&gt;" in frame
    assert "<script" not in frame  # the page's own are inside the frame's attribute


def test_the_short_html_holds_tables_words_and_no_markup_of_others(run, monkeypatch):
    brief = run._repr_html_()
    assert brief.count("<table>") == 1
    assert "<td>sps</td>" in brief
    assert "target\xa0" in brief
    assert "TTFT" not in brief  # a page of text is as wide as what is left
    assert "Proof: 0 of 2 prompts differ" in brief
    assert "<b>noisy: other programs were running" in brief
    assert "<style" not in brief
    assert "<script" not in brief


def test_compare_is_the_command_s_comparison(run, capsys, notebook):
    same = sb.compare(run, sb.load(run.path))
    assert same.passed
    assert str(same) == "pass: 3 rows: 3 same"
    assert list(same.df.index) == [("mini", label) for label in ("vanilla", "sps", "pld")]
    assert not same.df["fails"].any()
    same.show()
    assert notebook[0]["text/markdown"] == same._repr_markdown_()
    sys.modules["IPython"].get_ipython = lambda: None
    same.show()
    assert "pass: 3 rows: 3 same" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 2}, "'2' must be a share"),
        ({"fail_on": "slow"}, "'slow' must be some of .*did you mean 'slower'"),
    ],
)
def test_compare_refuses_what_the_command_refuses(run, settings, message):
    with pytest.raises(UsageError, match=message):
        sb.compare(run, run, **settings)


def test_methods_are_the_registry_s():
    table = sb.methods()
    assert list(table.index) == list(registry.entries())
    assert table.loc["eagle2", "needs"] == ("head",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 4}, r"run\(\): max_tokens is not known; did you mean 'max_new_tokens'\?"),
        ({"limit": 0}, r"run\(\): limit must be at least 1, got 0"),
        (
            {"methods": 7},
            r"run\(\): methods must contain names, or mappings with name, label and params",
        ),
        ({"out": 3}, r"run\(\): out must be a name or a path, got 3"),
        ({"config": 3}, r"run\(\): config must be a name or a path, got 3"),
        ({"methods": ["spss"]}, "no method 'spss'; did you mean 'sps'"),
        ({"tasks": ["gone.jsonl"]}, "gone.jsonl"),
        ({"set": {"pld": {"length": 2}}, "methods": "sps"}, r"run\(\) pld.length names a method"),
        ({"set": {"sps": 3}}, r"run\(\): set must be a mapping from methods"),
        ({"sweep": {"sps": {"length": "1:"}}}, r"run\(\): sweep.sps.length must be"),
        ({"methods": "sps", "set": {"sps": {"len": 2}}}, "sps.len is not known; did you mean"),
        ({"temperature": float("nan")}, r"run\(\): temperature must be a finite number"),
        ({"target": Path("nowhere/model/here")}, "nowhere/model/here"),
    ],
)
def test_a_wrong_setting_is_an_error_and_leaves_nothing(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        sb.run(**settings)
    assert not list(tmp_path.iterdir())


def test_void_times_are_warned_of_and_kept(run, monkeypatch):
    from specbench_cli.measure import run as measure

    monkeypatch.setattr(measure, "start_run", lambda *_: (None, SimpleNamespace(path=run.path)))
    monkeypatch.setattr(
        measure,
        "measure_run",
        lambda *_, **__: measure.RunResult(run.path, ExitCode.ENVIRONMENT, noisy=True),
    )
    with pytest.warns(UserWarning, match="the machine was not quiet"):
        found = sb.run()
    assert found.path == run.path


def test_a_run_leaves_torch_s_threads_as_they_were(monkeypatch):
    from specbench_cli.measure import run as measure

    def failing(*_, **__):
        torch.set_num_threads(before + 1)
        raise EnvironmentFault("no weights")

    before = torch.get_num_threads()
    monkeypatch.setattr(measure, "start_run", failing)
    with pytest.raises(EnvironmentFault, match="no weights"):
        sb.run()
    assert torch.get_num_threads() == before


def test_a_plug_in_that_was_changed_is_read_again(tmp_path, monkeypatch):
    """A notebook's process lives on while a file is edited."""
    monkeypatch.setattr(registry, "_plugin_methods", {})
    text = (
        "from specbench_cli.api import Draft, Field, Method, MethodParams, Session\n\n\n"
        "class Params(MethodParams):\n    times: int = Field(3, ge=1, description='copies')\n\n\n"
        "class Again(Method):\n    Params = Params\n\n"
        "    def propose(self, session: Session, limit: int) -> Draft:\n"
        "        return session.chain([session.tokens()[-1]] * self.params.times)\n"
    )
    for default in (3, 5):
        (tmp_path / "again.py").write_text(text.replace("3,", f"{default},"))
        assert registry.load_plugin("again.py") == ["again"]
        assert registry.build("again", {}).params.times == default


def test_several_targets_are_several_calls():
    with pytest.raises(UsageError, match="describe several runs, but a call makes one"):
        sb.run(targets=["embedded-7m", "embedded-exit"], methods="pld")


def test_the_page_names_every_setting():
    named = {*RunConfig.model_fields} | {"out", "config", "progress"}
    assert [name for name in sorted(named) if f"`{name}`" not in PAGE] == []


def test_the_former_name_of_a_comparison_warns():
    with pytest.warns(DeprecationWarning, match="ComparisonResult"):
        assert sb.Compared is sb.ComparisonResult
