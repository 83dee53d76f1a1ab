"""Tests of a pass in a child process and of the ways in which it may end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.measure import repeat_process, worker_process
from specbench_cli.store.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path / "run", {})


def run(monkeypatch, run_dir, code, *, resumable=False):
    """Run a Python program in place of the pass."""
    monkeypatch.setattr(
        repeat_process, "_command", lambda path, number: [sys.executable, "-c", code]
    )
    repeat_process.run_repeat(run_dir, 1, "pass 1", [], resumable=resumable)


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.BAD_ANSWER, ExitCode.ENVIRONMENT])
def test_a_finished_pass_is_no_error(monkeypatch, run_dir, code):
    run(monkeypatch, run_dir, f"exit({repeat_process.FINISHED_OFFSET + code})")


def test_a_pass_started_by_another_process_is_rejected():
    with pytest.raises(UsageError, match="--parent 1: that process did not start this one"):
        repeat_process.bind_to_parent(1)


def test_a_pass_that_exits_with_0_but_is_not_finished_is_an_error(monkeypatch, run_dir):
    with pytest.raises(repeat_process.UnfinishedRepeat, match="ended with exit code 0") as caught:
        run(monkeypatch, run_dir, "import os; os._exit(0)")
    assert (caught.value.exit_code, caught.value.already_reported) == (ExitCode.ENVIRONMENT, False)


def test_a_pass_shares_the_lock_of_its_parent(monkeypatch, run_dir):
    run_dir.acquire_lock()
    seen = f"import os; os.fstat({run_dir.lock.fd}); exit({int(repeat_process.FINISHED_OFFSET)})"
    run(monkeypatch, run_dir, seen)
    run_dir.release()


@pytest.mark.parametrize(
    ("name", "hint"), [("SIGKILL", "specbench run --resume"), ("SIGSEGV", "specbench run")]
)
def test_a_pass_ended_by_a_signal_is_an_environment_error(monkeypatch, run_dir, name, hint):
    kill = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    began = time.monotonic()
    with pytest.raises(repeat_process.UnfinishedRepeat) as caught:
        run(monkeypatch, run_dir, kill, resumable="--resume" in hint)
    assert time.monotonic() - began < 5
    fault = caught.value
    assert fault.message == f"pass 1 was not finished: its process was killed ({name})"
    assert fault.hint.startswith(hint)
    assert (fault.exit_code, fault.already_reported) == (ExitCode.ENVIRONMENT, False)


def test_an_interrupted_pass_has_printed_nothing(monkeypatch, run_dir):
    with pytest.raises(repeat_process.UnfinishedRepeat, match="ended with exit code 130") as caught:
        run(monkeypatch, run_dir, "exit(130)")
    assert (caught.value.exit_code, caught.value.already_reported) == (ExitCode.INTERRUPTED, False)


@pytest.mark.parametrize(
    ("code", "exit_code"), [(2, ExitCode.USAGE), (3, ExitCode.ENVIRONMENT), (77, ExitCode.BUG)]
)
def test_a_failed_pass_has_printed_its_error(monkeypatch, run_dir, code, exit_code):
    with pytest.raises(
        repeat_process.UnfinishedRepeat, match=f"ended with exit code {code}"
    ) as caught:
        run(monkeypatch, run_dir, f"exit({code})")
    assert (caught.value.exit_code, caught.value.already_reported) == (exit_code, True)
    assert caught.value.hint is None


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_interruption_ends_the_pass(monkeypatch, stubborn):
    monkeypatch.setattr(worker_process, "GRACE_S", (0.1, 0.5))
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else ""
    begun = []

    class Process(worker_process.subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            begun.append(self)

    monkeypatch.setattr(worker_process.subprocess, "Popen", Process)
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        repeat_process.run_command(
            [sys.executable, "-c", f"import signal, time\n{ignore}\ntime.sleep(20)"]
        )
    assert begun[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.fixture
def folder_with_module_names(tmp_path, monkeypatch):
    """A working folder with files that have the names of modules that a pass imports."""
    for name in ("rich", "socket", "pickle", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray file was imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_pass_does_not_import_modules_from_the_working_folder(folder_with_module_names, capfd):
    command = repeat_process._command(folder_with_module_names / "missing", 1)
    assert repeat_process.run_command(command) == ExitCode.USAGE
    assert "contains no run" in capfd.readouterr().err


def test_a_pass_finds_specbench_if_it_is_not_installed(
    folder_with_module_names, monkeypatch, capfd
):
    """specbench is not installed, and the run is started from another folder."""
    home = Path(repeat_process.__file__).parents[2]
    monkeypatch.setattr(sys, "path", [str(home), *(p for p in sys.path if p != str(home))])
    python, *rest = repeat_process._command(folder_with_module_names / "missing", 1)
    assert repeat_process.run_command([python, "-S", *rest]) == ExitCode.USAGE
    assert "contains no run" in capfd.readouterr().err
