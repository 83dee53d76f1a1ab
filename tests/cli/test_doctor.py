"""`specbench doctor`: what is missing, what does not work without it, and how to fix it."""

import importlib.metadata
import json
import re
import socket
import time
import tomllib
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.measure import assets, health
from specbench_cli.measure.quiet import NoiseMeter
from specbench_cli.models.aliases import Alias, aliases
from specbench_cli.tasks import task_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Set an empty folder and hub cache, a quiet machine, no network and no user variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("SPECBENCH_DATA", "SPECBENCH_DEBUG", "FORCE_COLOR", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(NoiseMeter, "close", lambda self: 0.01)


@pytest.fixture
def doctor(capsys):
    """Return a function that runs `specbench doctor --json`: exit code and checks by name."""

    def call():
        code = app._run(["doctor", "--json"])
        facts = json.loads(capsys.readouterr().out)
        assert facts["works"] is (code == 0)
        return code, {check["name"]: check for check in facts["checks"]}

    return call


def test_a_working_installation_is_exit_0(capsys):
    assert app._run(["doctor"]) == 0
    out, err = capsys.readouterr()
    heading, *rows = (line.split("\t") for line in out.splitlines())
    assert heading == ["name", "status", "found", "prevents", "mend"]
    names = [row[0] for row in rows]
    for name in ("python", "torch", "cpu", "memory", "gpu", "threads", "quietness", "hub"):
        assert name in names
    assert err == "the default run works: specbench run\n"


def test_every_failed_check_has_an_effect_and_a_fix(doctor):
    _, checks = doctor()
    for name, check in checks.items():
        assert check["status"] in ("ok", "limited", "missing"), name
        assert check["found"], name
        assert bool(check["prevents"]) == bool(check["mend"]) == (check["status"] != "ok"), name
    assert {f"task {name}" for name in task_names()} < checks.keys()


def test_a_terminal_shows_a_table_and_then_the_fixes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert app._run(["doctor"]) == 0
    out = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert "\nhub: affects downloads of models" in out
    assert "\n  fix: unset HF_HUB_OFFLINE" in out


def test_json_contains_no_path_host_or_user(doctor, tmp_path, monkeypatch):
    data = tmp_path / "private-data"
    data.mkdir()
    (data / "gsm8k_test.jsonl").write_text("")
    monkeypatch.setenv("SPECBENCH_DATA", str(data))
    _, checks = doctor()
    text = json.dumps(checks)
    for secret in (str(tmp_path), "private-data", str(Path.home()), socket.gethostname()):
        assert not re.search(rf"\b{re.escape(secret)}\b", text)  # `vm` is in `llvmlite`
    assert checks["task gsm8k"]["found"] == "local"


def test_a_missing_shipped_model_is_exit_3_with_the_command_to_fix_it(
    doctor, tmp_path, monkeypatch
):
    monkeypatch.setitem(aliases(), "embedded-7m", Alias(folder=str(tmp_path)))
    code, checks = doctor()
    assert code == 3
    check = checks["model embedded"]
    assert check["status"] == "missing"
    assert check["prevents"] == "the default run"
    assert "reinstall specbench-cli" in check["mend"]


def test_a_missing_or_old_package_is_exit_3(doctor, monkeypatch):
    real_version = importlib.metadata.version
    stale = {"pydantic": "1.10"}

    def version(name):
        if name == "rich":
            raise importlib.metadata.PackageNotFoundError(name)
        return stale.get(name) or real_version(name)

    lines = ["rich", "pydantic>=2.5", "psutil", 'no-such-tool>=1; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(importlib.metadata, "version", version)
    code, checks = doctor()
    assert code == 3
    assert (checks["rich"]["status"], checks["rich"]["found"]) == ("missing", "not installed")
    assert (checks["pydantic"]["status"], checks["pydantic"]["found"]) == ("missing", "1.10")
    assert checks["pydantic"]["mend"] == "pip install 'pydantic>=2.5'"
    assert checks["psutil"]["status"] == "ok"
    assert checks["extra test"]["status"] == "limited"
    assert checks["extra test"]["found"] == "not installed: no-such-tool"
    assert checks["extra test"]["prevents"] == "the tests, linters and type checks of this project"


def test_doctor_and_the_docs_describe_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    table = (
        (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8").split("| extra | for |")[1]
    )
    rows = [line.split("|")[1] for line in table.split("##")[0].splitlines() if "|" in line]
    assert set(health.EXTRAS) == extras
    assert {name for row in rows for name in re.findall("`(.+?)`", row)} == extras


def test_an_unwritable_folder_is_exit_3(doctor):
    Path("results").write_text("a file where the folder of runs should be")
    code, checks = doctor()
    assert code == 3
    assert checks["results"]["status"] == "missing"
    assert "--out DIR" in checks["results"]["mend"]


def test_noise_is_reported_but_does_not_fail_doctor(capsys, monkeypatch):
    monkeypatch.setattr(NoiseMeter, "close", lambda self: 0.4)
    assert app._run(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "other processes use 40.0% of the CPUs; the limit is 5%" in out
    assert "other programs would disturb its timings now" in err


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(health.shutil, "which", lambda name: None)
    check = health.check_compiler()
    assert (check.status, check.needed) == ("limited", False)
    assert "torch.compile" in check.prevents


@pytest.mark.parametrize("lacking", [True, False])
def test_missing_numba_threads_are_reported_if_its_kernels_would_be_used(monkeypatch, lacking):
    monkeypatch.setattr(health, "is_numba_missing", lambda: lacking)
    monkeypatch.setattr(health, "find_numba_kernels", lambda *_: None if lacking else health)
    check = health.check_kernels()
    assert (check.status, check.needed) == ("limited" if lacking else "ok", False)
    assert ("Numba" in check.found) != lacking and "libgomp" in check.mend


def test_more_threads_than_cpus_are_reported(monkeypatch):
    monkeypatch.setattr(health.torch, "get_num_threads", lambda: 10_000)
    check = next(check for check in health.check_hardware() if check.name == "threads")
    assert check.status == "limited"
    assert check.mend.startswith("specbench run --threads ")


# Data files


@pytest.mark.parametrize(
    ("location", "found"),
    [(None, "downloadable"), ("data", "local"), ("gzipped", "local"), ("cache", "cached")],
)
def test_doctor_finds_data_in_the_same_places_as_a_run(tmp_path, monkeypatch, location, found):
    source = assets.read_dataset_config(assets.SHIPPED / "gsm8k.yaml").sources[0]
    if location in ("data", "gzipped"):
        file = tmp_path / "data" / (source.file + (".gz" if location == "gzipped" else ""))
        monkeypatch.setenv("SPECBENCH_DATA", str(tmp_path / "data"))
    if location == "cache":
        file = assets.cache_folder() / "tasks" / source.sha256[:16] / source.file
    if location is not None:
        file.parent.mkdir(parents=True)
        file.touch()
    check = next(check for check in assets.check_tasks(True) if check.name == "task gsm8k")
    assert (check.status, check.found) == ("ok", found)


def test_data_to_download_is_limited_without_a_network():
    check = next(check for check in assets.check_tasks(False) if check.name == "task gsm8k")
    assert (check.status, check.found) == ("limited", "downloadable, but the hub is not reachable")
    assert check.mend.startswith("with a network connection: curl -L -o ")


def test_a_variable_with_a_missing_folder_is_reported(monkeypatch):
    monkeypatch.setenv("SPECBENCH_DATA", "gone")
    first = next(assets.check_tasks(True))
    assert (first.name, first.status) == ("SPECBENCH_DATA", "limited")


# The hub


def test_a_disabled_hub_names_the_variable_to_unset():
    check = assets.HubCall().check()
    assert (check.status, check.mend) == ("limited", "unset HF_HUB_OFFLINE")


def test_a_hub_that_refuses_connections_is_not_reachable(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    check = assets.HubCall().check()
    assert check.status == "limited"
    assert check.found.startswith("not reachable: ")
    assert "HF_ENDPOINT" in check.mend


def test_a_silent_hub_times_out_in_doctor(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(assets, "HUB_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        began = time.monotonic()
        check = assets.HubCall().check()
        assert time.monotonic() - began < 3
    assert check.status == "limited"


def test_doctor_writes_no_file(doctor):
    doctor()
    assert not list(Path().iterdir())
