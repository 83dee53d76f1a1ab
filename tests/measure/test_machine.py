"""Tests of the machine's fingerprint, which has no host name, user name or path."""

import getpass
import json
import platform
import subprocess
from pathlib import Path

import torch

from specbench_cli.measure import environment, machine


def test_fingerprint_is_stable_and_can_be_stored_as_json():
    first, second = machine.fingerprint(), machine.fingerprint()
    assert first["id"] == second["id"]
    assert len(first["id"]) == 12
    assert json.loads(json.dumps(first)) == first
    assert first["hardware"]["threads"] >= 1
    assert first["hardware"]["memory_gib"] >= 1
    assert first["versions"]["torch"] == torch.__version__
    assert first["versions"]["python"] == platform.python_version()
    assert first["threads"]["intra_op"] == torch.get_num_threads()
    assert first["clock"]["resolution_ns"] >= 1


def test_fingerprint_names_no_host_user_or_path(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/home/somebody/lib/libjemalloc.so:/opt/other.so")
    text = json.dumps(machine.fingerprint())
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}" not in text
    assert "somebody" not in text
    assert "libjemalloc.so:other.so" in text


def test_id_depends_on_hardware_but_not_on_software(monkeypatch):
    before = machine.fingerprint()["id"]
    monkeypatch.setattr(environment, "versions", lambda: {"torch": "0.0"})
    monkeypatch.setattr(machine, "system", lambda: {"os": "another"})
    assert machine.fingerprint()["id"] == before
    monkeypatch.setattr(machine, "hardware", lambda: {"cpu": "another"})
    assert machine.fingerprint()["id"] != before


def test_cpu_model_is_read_from_the_kernel(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2GHz\n")
    monkeypatch.setattr(machine, "CPUINFO", info)
    assert machine.hardware()["cpu"] == "Some CPU @ 2GHz"


def test_variables_that_are_not_set_are_left_out(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert environment.variables()["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in environment.variables()


def test_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package-anywhere",))
    assert environment.versions()["no-such-package-anywhere"] is None


def test_git_returns_the_commit_and_whether_the_checkout_is_dirty(monkeypatch, tmp_path):
    code = tmp_path / "specbench_cli" / "measure" / "environment.py"
    code.parent.mkdir(parents=True)
    code.write_text("")
    monkeypatch.setattr(environment, "__file__", str(code))
    assert environment.git() is None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    assert environment.git() is None  # no commit yet
    git("add", ".")
    git("commit", "-qm", "first")
    assert environment.git() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    code.write_text("changed")
    assert environment.git() == {"commit": git("rev-parse", "HEAD"), "dirty": True}
