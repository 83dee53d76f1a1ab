"""Tests of the Python interface, `import specbench_cli as sb`."""

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
SMALL_RUN = {"limit": 2, "max_new_tokens": 6, "allow_noise": True, "threads": 1}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a finished run of two methods, with a method parameter and one task family."""
    out = tmp_path_factory.mktemp("runs") / "first"
    settings = {"set": {"sps": {"length": 3}}, "category": ["qa"], "progress": False}
    return sb.run(methods=["sps", "pld"], tasks="mini", out=out, **settings, **SMALL_RUN)


@pytest.fixture
def notebook(monkeypatch):
    """Fake a notebook kernel, and return the list of displayed outputs."""
    displayed = []
    kernel = SimpleNamespace(kernel=object())
    display = SimpleNamespace(display=lambda formats, raw: displayed.append(formats))
    ipython = SimpleNamespace(get_ipython=lambda: kernel, version_info=(9, 0))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return displayed


def test_the_package_imports_no_heavy_module_and_lists_all_names():
    heavy_modules = "torch transformers numpy pandas matplotlib scipy pydantic rich typer".split()
    code = (
        "import json, sys, specbench_cli as sb;"
        f"imported = [name for name in {heavy_modules} if name in sys.modules];"
        "print(json.dumps([imported, len(sys.modules), dir(sb)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, check=True
    )
    imported, modules, names = json.loads(process.stdout)
    assert (imported, set(sb.__all__) - set(names)) == ([], set())
    assert modules < 100
    with pytest.raises(AttributeError, match="'specbench_cli' has no attribute 'runn'"):
        sb.runn  # noqa: B018


def test_submodules_do_not_replace_functions_of_the_package():
    """A submodule of the same name would replace the attribute after its import."""
    importlib.import_module("specbench_cli.app")
    importlib.import_module("specbench_cli.comparison.compare")
    assert all(inspect.isroutine(getattr(sb, name)) for name in ("run", "load", "compare"))
    assert not [name for name in sb.__all__ if (ROOT / "specbench_cli" / name).exists()]


def test_a_run_equals_that_of_the_command(run, tmp_path):
    """`sb.run` and `specbench run` write the same files and, except for times, records."""
    line = "run -m sps,pld -t mini --category qa --set sps.length=3 --limit 2 --max-new-tokens 6"
    code = app._run([*line.split(), "--allow-noise", "--threads", "1", "--out", "second"])
    second = RunDir.open(tmp_path / "second")
    assert code == run.exit_code == ExitCode.OK
    run_config, command_config = (each.manifest["config"] for each in (run, second))
    assert run_config["effective"] == command_config["effective"]
    assert run.manifest["config_sources"]["limit"] == "run()"
    files = {path.name for path in run.path.iterdir()}
    assert files == {path.name for path in second.path.iterdir()} > {"records.parquet"}
    first = RunDir.open(run.path).records()
    for run_record, command_record in zip(first, second.records(), strict=True):
        facts = [
            (each.label, each.output_ids, each.steps, each.params.effective, each.verdict)
            for each in (run_record, command_record)
        ]
        assert facts[0] == facts[1]


@pytest.mark.parametrize(("cpu_seconds", "expected"), [(1.5, 1.5), (4000.0, 3.0)])
def test_the_eta_uses_at_most_3_seconds_of_start_time(monkeypatch, cpu_seconds, expected):
    """The CPU time of a notebook kernel, which may have run for hours, is limited in the ETA."""
    calls = []
    monkeypatch.setattr("time.process_time", lambda: cpu_seconds)
    monkeypatch.setattr(
        _progress,
        "make_progress",
        lambda **options: calls.append(options) or _progress.ProgressDisplay(),
    )
    with pytest.raises(UsageError, match="positions"):
        sb.run(methods="pld", limit=1, max_new_tokens=10**9)
    assert calls == [{"json": False, "start_s": expected}]


def test_df_equals_the_parquet_file_with_a_row_per_record(run):
    records = list(RunDir.open(run.path).records())
    assert len(run.df) == len(records) == 6
    assert list(run.df["ns_total"]) == [record.ns.total for record in records]
    pandas.testing.assert_frame_equal(run.df, pandas.read_parquet(run.path / "records.parquet"))


def test_summary_has_a_row_per_method_and_families_one_per_family(run):
    assert set(run.summary.index) == {"vanilla", "sps", "pld"}
    assert set(run.summary.columns) == {*MethodSummary.__dataclass_fields__} - {"label"}
    for name in ("speedup", "speedup_low", "speedup_high", "mat"):
        assert run.summary[name].dtype == float
    assert run.summary.loc["sps", "mat"] == pytest.approx(
        run.df[run.df.label == "sps"].steps_committed.map(sum).sum()
        / run.df[run.df.label == "sps"].steps_committed.map(len).sum()
    )
    assert set(run.families.index) == {("qa", label) for label in run.summary.index}


def test_a_loaded_run_equals_the_returned_one(run, tmp_path, monkeypatch):
    loaded = sb.load(run.path)
    pandas.testing.assert_frame_equal(loaded.summary, run.summary)
    assert (repr(loaded), str(loaded)) == (repr(run), str(run))
    with pytest.raises(UsageError, match=r"there is no run in results/runs"):
        sb.load()
    with pytest.raises(UsageError, match="nowhere"):
        sb.load("nowhere")


def test_a_value_that_is_not_a_run_is_refused(run):
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


def test_in_a_notebook_show_displays_the_report_in_an_iframe(run, notebook):
    run.show()
    (formats,) = notebook
    assert formats["text/plain"] == str(run)
    frame = formats["text/html"]
    assert frame.startswith('<div><iframe sandbox="allow-scripts"')
    assert "&lt;!doctype html&gt;" in frame
    assert "<script" not in frame  # the page's scripts are escaped inside the frame's attribute


def test_the_short_html_has_tables_and_no_foreign_markup(run, monkeypatch):
    short_html = run._repr_html_()
    assert short_html.count("<table>") == 1
    assert "<td>sps</td>" in short_html
    assert "target\xa0" in short_html
    assert "TTFT" not in short_html  # the short table omits this column to save width
    assert "Proof: 0 of 2 prompts differ" in short_html
    assert "<b>noisy: other programs were running" in short_html
    assert "<style" not in short_html
    assert "<script" not in short_html


def test_compare_equals_the_comparison_of_the_command(run, capsys, notebook):
    comparison = sb.compare(run, sb.load(run.path))
    assert comparison.passed
    assert str(comparison) == "pass: 3 rows: 3 same"
    assert list(comparison.df.index) == [("mini", label) for label in ("vanilla", "sps", "pld")]
    assert not comparison.df["fails"].any()
    comparison.show()
    assert notebook[0]["text/markdown"] == comparison._repr_markdown_()
    sys.modules["IPython"].get_ipython = lambda: None
    comparison.show()
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


def test_methods_lists_the_registry():
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
def test_a_wrong_setting_is_an_error_and_writes_nothing(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        sb.run(**settings)
    assert not list(tmp_path.iterdir())


def test_noisy_times_are_kept_with_a_warning(run, monkeypatch):
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


def test_a_run_restores_the_number_of_torch_threads(monkeypatch):
    from specbench_cli.measure import run as measure

    def failing(*_, **__):
        torch.set_num_threads(before + 1)
        raise EnvironmentFault("no weights")

    before = torch.get_num_threads()
    monkeypatch.setattr(measure, "start_run", failing)
    with pytest.raises(EnvironmentFault, match="no weights"):
        sb.run()
    assert torch.get_num_threads() == before


def test_a_changed_plug_in_is_loaded_again(tmp_path, monkeypatch):
    """A notebook's process continues while the user edits the file."""
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


def test_several_targets_need_several_calls():
    with pytest.raises(UsageError, match="describe several runs, but a call makes one"):
        sb.run(targets=["embedded-7m", "embedded-exit"], methods="pld")


def test_the_page_names_every_setting():
    settings = {*RunConfig.model_fields} | {"out", "config", "progress"}
    assert [name for name in sorted(settings) if f"`{name}`" not in PAGE] == []


def test_the_former_name_of_a_comparison_warns():
    with pytest.warns(DeprecationWarning, match="ComparisonResult"):
        assert sb.Compared is sb.ComparisonResult
