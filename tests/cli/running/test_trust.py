"""Plug-ins that a folder names run only if the user permitted exactly this file."""

from __future__ import annotations

import io
import json
import shutil
import sys
import textwrap

import pytest

from specbench_cli import app, python, registry
from specbench_cli.audit import runner
from specbench_cli.commands._progress import ProgressDisplay
from specbench_cli.config import permission, plugin_file
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure import run as execute

pytestmark = pytest.mark.usefixtures("small_pair")

SMALL = {"limit": 1, "max_new_tokens": 4, "allow_noise": True, "isolation": "none"}
PLUGIN = """
    from pathlib import Path
    with (Path(__file__).parent / "RAN").open("a") as file:
        file.write("{word}")
    from specbench_cli.api import Method
    class Own(Method):
        name = "own"
        def generate(self, session):
            yield from vanilla(session)
    from methods.vanilla import Vanilla
    def vanilla(session):
        yield from Vanilla(Vanilla.Params()).generate(session)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Start without permissions and without a terminal."""
    monkeypatch.setattr(permission, "_permitted", set())
    monkeypatch.setattr(permission, "_folder", lambda: tmp_path / "cache/permitted")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(registry, "_plugin_methods", {})
    forget()
    yield
    plugin_file.unpin_all()


def forget():
    """Make the next command import plug-in files again."""
    for name in [name for name in sys.modules if name.startswith("specbench_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def cli(capsys):
    def call(*args):
        code = app._run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return call


@pytest.fixture
def write(tmp_path):
    """Write a plug-in that stores a word in a file when it runs."""

    def make(path, word="x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(PLUGIN.format(word=word)))
        return path

    return make


def has_run(folder):
    file = folder / "RAN"
    return file.read_text() if file.exists() else ""


@pytest.fixture
def foreign_run(tmp_path, write, monkeypatch):
    """Return a run folder from another machine, with its plug-in inside."""
    start_run(write(tmp_path / "there/evil.py"), tmp_path / "there/run")
    folder = tmp_path / "here"
    shutil.copytree(tmp_path / "there/run", folder)
    shutil.copy(tmp_path / "there/evil.py", folder)
    change(folder, plugins=[str(folder / "evil.py")])
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(permission, "_permitted", set())
    return folder


def start_run(plugin, folder):
    """Start a run and leave it unfinished."""
    config = RunConfig(methods=["vanilla", {"name": "own"}], plugins=[str(plugin)], **SMALL)
    registry.load_plugin(str(plugin))
    execute.start_run(config, {}, folder, ProgressDisplay())[1].release()


def change(folder, **order):
    """Change the stored configuration of a run."""
    file = folder / ".resume.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | order))


def without_plugin(folder, **order):
    """Remove the plug-in from a run's configuration, and change other settings."""
    change(folder, plugins=[], **{"methods": [{"name": "vanilla"}], **order})
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["method_files"]["own"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


# A run that is resumed


def test_foreign_plug_in_runs_only_if_permitted(foreign_run, cli):
    code, _, err = cli("run", "--resume", foreign_run)
    assert code == 2
    assert f"requests the plug-in {foreign_run / 'evil.py'}" in err
    assert "--trust" in err
    assert has_run(foreign_run) == ""


def test_permitted_plug_in_runs_and_is_remembered(foreign_run, cli, monkeypatch):
    assert cli("run", "--resume", foreign_run, "--trust")[0] == 0
    assert has_run(foreign_run) == "x"
    monkeypatch.setattr(permission, "_permitted", set())
    assert all(
        each.is_granted for each in permission.plugin_requests([str(foreign_run / "evil.py")])
    )


@pytest.mark.parametrize("flags", [[], ["--trust"]])
def test_changed_plug_in_is_refused_before_it_runs(foreign_run, write, cli, flags):
    write(foreign_run / "evil.py", word="other")
    code, _, err = cli("run", "--resume", foreign_run, *flags)
    assert code == 2
    assert "cannot be resumed, because this has changed" in err
    assert "the file of own (" in err
    assert has_run(foreign_run) == ""


def test_force_does_not_permit_a_foreign_plug_in(foreign_run, cli):
    assert cli("run", "--resume", foreign_run, "--force")[0] == 2
    assert has_run(foreign_run) == ""


def test_changed_plug_in_runs_if_it_is_both_forced_and_permitted(foreign_run, write, cli):
    write(foreign_run / "evil.py", word="other")
    assert cli("run", "--resume", foreign_run, "--force", "--trust")[0] == 0
    assert has_run(foreign_run) == "other"


def test_a_forged_checksum_in_the_manifest_is_not_a_permission(foreign_run, write, cli):
    file = write(foreign_run / "evil.py", word="other")
    manifest = json.loads((foreign_run / "manifest.json").read_text())
    manifest["method_files"]["own"] = permission.sha256(file.read_bytes()).hexdigest()
    (foreign_run / "manifest.json").write_text(json.dumps(manifest))
    assert cli("run", "--resume", foreign_run)[0] == 2
    assert has_run(foreign_run) == ""


def test_permission_does_not_apply_to_a_copy_in_another_folder(foreign_run, tmp_path, cli):
    permission.permit(permission.plugin_requests([str(tmp_path / "there/evil.py")]))
    assert cli("run", "--resume", foreign_run)[0] == 2
    assert has_run(foreign_run) == ""


def test_permission_of_a_linked_plug_in_applies_to_its_target(foreign_run, tmp_path, cli, write):
    permitted = foreign_run / "evil.py"
    permission.permit(permission.plugin_requests([str(permitted)]))
    other = write(tmp_path / "other/evil.py")
    permitted.unlink()
    permitted.symlink_to(other)
    assert cli("run", "--resume", foreign_run)[0] == 2
    assert has_run(other.parent) == ""


def test_second_plug_in_of_a_folder_needs_its_own_permission(foreign_run, cli, write):
    permission.permit(permission.plugin_requests([str(foreign_run / "evil.py")]))
    write(foreign_run / "more/second.py")
    change(foreign_run, plugins=[str(foreign_run / name) for name in ("evil.py", "more/second.py")])
    code, _, err = cli("run", "--resume", foreign_run)
    assert (code, "second.py" in err) == (2, True)
    assert has_run(foreign_run / "more") == has_run(foreign_run) == ""


def test_resuming_from_python_is_refused_too(foreign_run):
    with pytest.raises(UsageError, match="have not permitted"):
        execute.resume_run(foreign_run, ProgressDisplay())
    assert has_run(foreign_run) == ""
    assert not (foreign_run / ".lock").exists()


def test_user_is_asked_at_a_terminal(foreign_run, cli, monkeypatch):
    monkeypatch.setattr("specbench_cli.commands._trust.sys", _Terminal)
    for answer, code, word in ((False, 2, ""), (True, 0, "x")):
        monkeypatch.setattr("typer.confirm", lambda *_, answer=answer, **__: answer)
        forget()
        assert cli("run", "--resume", foreign_run)[0] == code
        assert has_run(foreign_run) == word


class _Terminal:
    class stdin:  # noqa: N801
        isatty = staticmethod(lambda: True)

    stderr = stdin


def test_run_that_the_user_ordered_is_resumed_without_a_question(tmp_path, cli, write):
    start_run(write(tmp_path / "mine.py"), tmp_path / "run")
    assert cli("run", "--resume", tmp_path / "run")[0] == 0


def test_foreign_run_without_containment_is_refused(foreign_run, cli):
    without_plugin(foreign_run, run_code=True, uncontained=True)
    code, _, err = cli("run", "--resume", foreign_run)
    assert (code, "without containment" in err) == (2, True)


def test_foreign_run_that_sends_an_environment_variable_is_refused(foreign_run, cli, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "secret")
    params = {"url": "https://127.0.0.1:9", "key": "MY_SECRET"}
    server = {"name": "engine:http", "params": params}
    without_plugin(foreign_run, methods=[{"name": "vanilla"}, server])
    code, _, err = cli("run", "--resume", foreign_run)
    assert (code, "MY_SECRET to be sent to https://127.0.0.1:9" in err) == (2, True)


@pytest.mark.parametrize("is_started", [True, False])
def test_foreign_matrix_is_refused(foreign_run, tmp_path, cli, is_started):
    matrix = tmp_path / "matrix"
    matrix.mkdir()
    if is_started:
        shutil.move(foreign_run, matrix / "a")
        foreign_run = matrix / "a"
    text = (foreign_run / ".resume.json").read_text()
    (matrix / "matrix.json").write_text('{"runs": ["a"]}')
    order = {"runs": {"a": text.replace(str(tmp_path / "here"), str(foreign_run))}, "sources": {}}
    (foreign_run / ".resume.json").write_text(order["runs"]["a"])
    (matrix / ".matrix.resume.json").write_text(json.dumps(order))
    code, _, err = cli("run", "--resume", matrix)
    assert (code, "have not permitted" in err) == (2, True)
    assert has_run(foreign_run) == ""


def test_foreign_recommendation_is_refused(tmp_path, cli, write):
    from specbench_cli.predict.recommend.journal import FILE, Journal

    folder = tmp_path / "picked"
    plugin = write(folder / "evil.py")
    journal = Journal(
        version="0.1.0",
        created_utc="2026-11-27T00:00:00+00:00",
        minutes=1,
        config=RunConfig(methods=["vanilla"], plugins=[str(plugin)]),
        sources={},
        waves=[["own"]],
        left_out={},
        search=["mini/qa-001"],
        held_out=["mini/qa-002"],
    )
    (folder / FILE).write_text(journal.model_dump_json(by_alias=True))
    code, _, err = cli("recommend", "--resume", folder)
    assert (code, "have not permitted" in err) == (2, True)
    assert has_run(folder) == ""


# A `specbench.yaml` in the working folder (an implicit config file)


@pytest.fixture
def found(tmp_path, write):
    """Return the plug-in of an implicit config file."""
    write(tmp_path / "evil.py")
    (tmp_path / "specbench.yaml").write_text("plugins: [evil.py]\nisolation: none\n")
    return tmp_path


COMMANDS = [
    ["run", "--dry-run"],
    ["run", "--dry-run", "--isolation", "process"],
    ["run", "--limit", "1", "--out", "r"],
    ["recommend", "--minutes", "1"],
    ["predict", "--probe"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_plug_in_of_an_implicit_config_file_does_not_run(found, cli, words):
    code, _, err = cli(*words)
    assert code == 2
    assert f"specbench.yaml requests the plug-in {found / 'evil.py'}" in err
    assert has_run(found) == ""


def test_python_api_does_not_run_a_plug_in_of_an_implicit_config_file(found):
    with pytest.raises(UsageError, match="have not permitted"):
        python.run(limit=1)
    assert has_run(found) == ""


def test_plug_in_of_an_implicit_config_file_runs_if_permitted_or_named(found, cli, monkeypatch):
    for words in (["--trust"], ["--plugin", "evil.py"], ["--config", "specbench.yaml"]):
        monkeypatch.setattr(permission, "_permitted", set())
        shutil.rmtree(found / "cache", ignore_errors=True)
        forget()
        (found / "RAN").unlink(missing_ok=True)
        assert cli("run", "--dry-run", *words)[0] == 0
        assert has_run(found) == "x"


def test_permission_ends_when_the_plug_in_changes(found, cli, write):
    assert cli("run", "--dry-run", "--trust")[0] == 0
    assert cli("run", "--dry-run")[0] == 0
    (found / "RAN").unlink()
    write(found / "evil.py", word="other")
    assert cli("run", "--dry-run")[0] == 2
    assert has_run(found) == ""


@pytest.mark.parametrize(
    "lines",
    [
        "plugins: evil.py",
        "plugins: [./evil.py]",
        "plugins: [../{name}/evil.py]",
        "plugins: [nothing.py, evil.py]",
        "plugins: ['evil.py']\ntrust: true",
        "plugins: [link.py]",
    ],
)
def test_other_keys_of_a_config_file_are_not_a_permission(found, cli, lines):
    (found / "link.py").symlink_to(found / "evil.py")
    text = lines.format(name=found.name) + "\nisolation: none\n"
    (found / "specbench.yaml").write_text(text)
    assert cli("run", "--dry-run")[0] == 2
    assert has_run(found) == ""


def test_implicit_config_file_cannot_disable_containment(tmp_path, cli):
    (tmp_path / "specbench.yaml").write_text("uncontained: true\n")
    code, _, err = cli("run", "--dry-run", "--run-code", "-t", "humaneval")
    assert (code, "without containment" in err) == (2, True)


def test_implicit_config_file_cannot_send_an_environment_variable(tmp_path, cli, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "secret")
    (tmp_path / "specbench.yaml").write_text(
        "methods: ['engine:http']\nset: {'engine:http': {url: 'https://x.test', key: MY_SECRET}}\n"
    )
    code, _, err = cli("run", "--dry-run")
    assert (code, "MY_SECRET to be sent to https://x.test" in err) == (2, True)


URL, KEY = "https://x.test", "MY_SECRET"
ROW = f"{{url: '{URL}', key: {KEY}}}"
SWEPT = f"{{url: ['{URL}'], key: [{KEY}]}}"


@pytest.mark.parametrize("method", ["engine:http", "engine:http-vanilla"])
@pytest.mark.parametrize(
    "lines",
    [
        "sweep: {{'{method}': {swept}}}",
        "methods: ['{method}']\nsweep: {{'{method}': {swept}}}",
        "methods: [{{name: '{method}', params: {row}}}]",
        "methods: [{{name: '{method}', params: {row}, label: mine}}]",
        "methods: ['{method}']\nset: {{'{method}': {row}}}",
        "tune: 2\nmethods: ['{method}']\nsweep: {{'{method}': {swept}}}",
        "tune: 2\nmethods: ['{method}']\nset: {{'{method}': {{url: '{url}'}}}}"
        "\nsweep: {{'{method}': {{key: [MY_SECRET, null]}}}}",
    ],
)
def test_no_setting_of_a_config_file_sends_a_variable_away(
    tmp_path, cli, monkeypatch, method, lines
):
    monkeypatch.setenv(KEY, "secret")
    text = lines.format(method=method, row=ROW, swept=SWEPT, url=URL)
    (tmp_path / "specbench.yaml").write_text(text)
    code, _, err = cli("run", "--dry-run")
    assert (code, f"{KEY} to be sent to {URL}" in err) == (2, True), err


def test_server_of_a_config_file_does_not_get_the_key_that_the_user_names(
    tmp_path, cli, monkeypatch
):
    monkeypatch.setenv(KEY, "secret")
    (tmp_path / "specbench.yaml").write_text(f"sweep: {{'engine:http': {{url: ['{URL}']}}}}")
    code, _, err = cli("run", "--dry-run", "--set", f"engine:http.key={KEY}")
    assert (code, f"{KEY} to be sent to {URL}" in err) == (2, True), err


def test_a_foreign_run_that_tunes_an_environment_variable_is_refused(foreign_run, cli, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    server = {"name": "engine:http-vanilla", "params": {"url": URL}}
    sweeps = {"engine:http-vanilla": {"key": [KEY]}}
    without_plugin(foreign_run, methods=[{"name": "vanilla"}, server], sweep=sweeps, tune=2)
    code, _, err = cli("run", "--resume", foreign_run)
    assert (code, f"{KEY} to be sent to {URL}" in err) == (2, True), err


def test_every_parameter_that_names_an_environment_variable_is_asked_for():
    named = {
        name
        for method in registry.built_in_methods()
        for name, field in registry.load(method).Params.model_fields.items()
        if "environment variable" in (field.description or "")
    }
    assert named == {permission.KEY}


# A file that changes after it was checked


@pytest.fixture
def swap(monkeypatch, write):
    """Have a plug-in replaced as soon as it was checked."""

    def make(plugin):
        def check(path, source, real=permission.check):
            real(path, source)
            write(plugin, word="other")

        monkeypatch.setattr(permission, "check", check)
        monkeypatch.setattr("specbench_cli.commands._trust._ask", check)

    return make


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_plug_in_of_a_config_file_that_changes_after_its_check_is_the_checked_one(
    found, cli, swap, isolation
):
    permission.permit(permission.plugin_requests([str(found / "evil.py")]))
    swap(found / "evil.py")
    assert cli("run", "--dry-run", "--isolation", isolation)[0] == 0
    assert set(has_run(found)) == {"x"}


def test_plug_in_of_a_run_that_changes_after_its_check_is_the_checked_one(foreign_run, swap):
    permission.permit(permission.plugin_requests([str(foreign_run / "evil.py")]))
    swap(foreign_run / "evil.py")
    plan, run_dir = execute.resume_run(foreign_run, ProgressDisplay())
    run_dir.release()
    assert has_run(foreign_run) == "x"
    assert run_dir.manifest["method_files"]["own"] in {
        method_run.file_sha256 for method_run in plan.method_runs
    }


def test_audit_s_processes_run_the_plug_in_that_was_read_first(tmp_path, write, monkeypatch):
    file = write(tmp_path / "own.py")
    monkeypatch.setattr(runner, "usable_cpus", lambda: 2)
    plugin_file.pin(file)
    write(file, word="other")
    with pytest.raises(UsageError, match="there is no method"):
        list(runner.audit_all(["nosuch-a", "nosuch-b"], [str(file)]))
    plugin_file.unpin_all()
    assert set(has_run(tmp_path)) == {"x"}


# Commands that only read a run


@pytest.mark.parametrize(
    "words",
    [
        ["report", "RUN"],
        ["report", "RUN", "--to", "md", "--out", "r"],
        ["compare", "RUN", "RUN"],
        ["predict", "RUN"],
        ["predict", "RUN", "--sweep", "sps.length=1:3:1"],
        ["publish", "RUN", "--to", "g"],
        ["export", "RUN", "--lm-eval", "--out", "e"],
        ["list", "runs"],
        ["audit", "own"],
    ],
    ids=" ".join,
)
def test_command_that_reads_a_run_imports_none_of_its_plug_ins(foreign_run, cli, words):
    cli(*(str(foreign_run) if word == "RUN" else word for word in words))
    assert has_run(foreign_run) == ""


def test_an_implicit_config_file_sends_no_prompts_to_a_server(tmp_path, cli):
    (tmp_path / "questions.txt").write_text("private\n")
    (tmp_path / "specbench.yaml").write_text(
        f"tasks: [questions.txt]\nmethods: [{{name: 'engine:http', params: {{url: '{URL}'}}}}]\n"
    )
    code, _, err = cli("run", "--dry-run")
    assert (code, f"prompts to be sent to {URL}" in err) == (2, True), err
