"""Runs with a drafter in a separate process, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specbench_cli import app
from specbench_cli.store.run_dir import RunDir

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "specbench_cli", "run"]
SMALL = ["-m", "pearl", "--category", "qa", "--limit", "3", "--max-new-tokens", "8"]


@pytest.fixture
def env():
    return {**os.environ, "PYTHONPATH": str(ROOT), "SPECBENCH_DEBUG": ""}


@pytest.mark.long
def test_a_killed_repeat_is_one_error_and_leaves_no_process(tmp_path, env):
    out = tmp_path / "run"
    command = [*COMMAND, *SMALL, "--allow-noise", "--json", "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as run:
        kinds = []
        for line in run.stdout:
            kinds.append(json.loads(line)["event"])
            if kinds[-1] == "cell":
                break
        assert [k for k in kinds if k not in ("stage", "prompt", "window")] == [
            "plan",
            "start",
            "cell",
        ]
        processes = psutil.Process(run.pid).children(recursive=True)
        (pass_,) = (each for each in processes if "--only-pass" in each.cmdline())
        assert len(processes) > 1  # with the drafter's process
        pass_.kill()
        killed_at = time.monotonic()
        stderr = run.stderr.read()
        run.wait()
        assert time.monotonic() - killed_at < 20  # 5 s on a quiet machine
    assert run.returncode == 3
    assert stderr == (
        "error: pass 1 was not finished: its process was killed (SIGKILL)\n"
        f"hint: specbench run --resume {out}\n"
    )
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    run_dir = RunDir.open(out)
    assert run_dir.manifest["status"] == "interrupted"
    assert 1 <= len(list(run_dir.records())) < 6


def test_missing_devices_are_refused_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run_refused(*args):
        code = app._run(["run", *args])
        return code, capsys.readouterr().err

    code, stderr = run_refused("-m", "pearl", "--devices", "target=cpu:0,draft=cpu:4000")
    assert code == 3
    assert "may not use core 4000" in stderr
    code, stderr = run_refused("-m", "pearl", "--devices", "target=cpu:0,draft=cpu:0")
    assert code == 2
    assert stderr.startswith("error: --devices gives core 0 to both target and draft")
    monkeypatch.setenv("SPECBENCH_DEVICES", "target=cpu:0,draft=cpu:1")
    code, stderr = run_refused("-m", "sps")
    assert code == 2
    assert "--devices needs a method that drafts in parallel with the target" in stderr
    assert list(tmp_path.iterdir()) == []
