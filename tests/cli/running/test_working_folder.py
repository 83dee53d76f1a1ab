"""Processes that specbench starts import no module from the working folder."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specbench_cli
from specbench_cli.audit import runner
from specbench_cli.engine.workers.process_lifetime import block_interrupts
from specbench_cli.errors import UsageError

HIDDEN = ("multiprocessing", "json", "pickle", "socket", "torch", "pydantic", "numpy")
PLUGIN = """
from methods.vanilla import Vanilla


class Own(Vanilla):
    name = "own"
"""


@pytest.fixture
def folder(tmp_path):
    """Return a foreign folder whose modules write a file when they are imported."""
    path = tmp_path / "there"
    path.mkdir()
    for name in HIDDEN:
        (path / f"{name}.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'a').write('{name} ')")
    return path


def has_run(folder):
    file = folder.parent / "RAN"
    return file.read_text() if file.exists() else ""


def call(folder, *words):
    """Run specbench in a folder, as its console script does."""
    script = folder.parent / "bin/specbench"
    script.parent.mkdir()
    script.write_text(
        "from specbench_cli.__main__ import main\nif __name__ == '__main__':\n    main()\n"
    )
    root = str(Path(specbench_cli.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": root}
    command = [sys.executable, script, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("in_foreign_folder")
def test_audits_in_several_processes_run_no_module_of_the_working_folder(folder, monkeypatch):
    monkeypatch.setattr(runner, "usable_cpus", lambda: 2)
    with pytest.raises(UsageError, match="there is no method"):  # the audit's processes work
        list(runner.audit_all(["nosuch-a", "nosuch-b"]))
    assert has_run(folder) == ""


def test_plug_in_s_process_runs_no_module_of_the_working_folder(folder):
    (folder.parent / "own.py").write_text(PLUGIN)
    done = call(folder, "run", "--dry-run", "--plugin", "../own.py", "--isolation", "process")
    assert (done.returncode, has_run(folder)) == (0, ""), done.stderr


@pytest.mark.usefixtures("in_foreign_folder")
def test_process_that_is_spawned_runs_no_module_of_the_working_folder(folder, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    context = multiprocessing.get_context("spawn")
    with block_interrupts(context):
        process = context.Process(target=os.getpid)
        process.start()
    process.join()
    assert (process.exitcode, has_run(folder)) == (0, "")
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize("name", ["yaml", "evil"])
def test_python_m_imports_no_module_of_the_working_folder(folder, name):
    for file in folder.iterdir():
        file.unlink()
    (folder / f"{name}.py").write_text(f"open({str(folder.parent / 'RAN')!r}, 'a').close()")
    package = folder / "evil-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[specbench.methods]\nevil = evil:Evil\n")
    root = str(Path(specbench_cli.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": root}
    command = [sys.executable, "-m", "specbench_cli", "run", "--dry-run", "-m", "evil"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "there is no method 'evil'" in done.stderr) == (2, True), done.stderr
    assert not (folder.parent / "RAN").exists()


@pytest.fixture
def in_foreign_folder(folder, monkeypatch):
    """Make the folder the working folder, but keep it out of the import path."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])


def test_settings_of_numba_in_the_working_folder_are_refused(folder):
    """Settings of numba could name a cache of pickles."""
    for file in folder.iterdir():
        file.unlink()
    (folder / ".numba_config.yaml").write_text("cache_dir: nb\n")
    done = call(folder, "run", "-m", "pld", "--limit", "1", "--max-new-tokens", "4", "--out", "o")
    assert done.returncode == 2
    assert ".numba_config.yaml in this folder configures numba and could" in done.stderr
