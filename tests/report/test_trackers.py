"""Tests of exporting to experiment trackers, without network access."""

import socket
import sys
import types
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.report import trackers
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir

RUN = Path(__file__).parents[2] / "results/reference/default-2cores"


@pytest.fixture(scope="module")
def rows():
    return {row.label: row for row in read_report_data(RunDir.open(RUN)).summary.rows}


def test_figures_are_numbers_and_settings_are_single_values(rows):
    run = RunDir.open(RUN)
    metrics = trackers._metrics(rows["vanilla"])
    assert metrics["speedup"] == 1.0
    assert all(type(value) is float for value in metrics.values())
    assert "speedup_low" not in metrics  # the baseline has no interval
    assert "broken" not in metrics
    config = trackers._config(run, rows["sps"])
    assert (config["target"], config["sps.length"]) == ("embedded-7m", rows["sps"].params["length"])
    assert not [value for value in config.values() if isinstance(value, list | dict)]


def test_each_method_has_a_stable_unique_run_id(rows):
    run = RunDir.open(RUN)
    ids = [trackers._id(run, row) for row in rows.values()]
    assert len(set(ids)) == len(ids)
    assert ids == [trackers._id(RunDir.open(RUN), row) for row in rows.values()]


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_a_missing_tracker_package_is_an_error_with_a_hint(tracker, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, tracker, None)
    assert app._run(["export", str(RUN), f"--{tracker}", "--out", str(tmp_path)]) == 3
    message = capsys.readouterr().err
    assert f"the Python package '{tracker}' is not installed" in message
    assert f"specbench-cli[{tracker}]" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")
def test_wandb_has_one_offline_run_per_method(tmp_path, rows, capsys, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a-name-of-this-machine")
    assert app._run(["export", str(RUN), "--wandb", "--out", str(tmp_path)]) == 0
    files = list(tmp_path.glob("wandb/wandb/offline-run-*/run-*.wandb"))
    ids = {file.stem.removeprefix("run-") for file in files}
    assert ids == {trackers._id(RunDir.open(RUN), row) for row in rows.values()}
    whole = b"".join(file.read_bytes() for file in files)
    assert b"specbench.machine" not in whole  # only the value of a tag is stored
    assert b"embedded-7m" in whole
    assert b"decode_speedup" in whole
    assert b"a-name-of-this-machine" not in whole
    assert "next: wandb sync" in capsys.readouterr().err


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")
def test_mlflow_has_one_run_per_method_after_repeated_exports(tmp_path, rows, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        assert app._run(["export", str(RUN), "--mlflow", "--out", str(tmp_path)]) == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name(trackers.PROJECT)
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == rows.keys()
    for label, run in found.items():
        assert run.data.metrics == pytest.approx(trackers._metrics(rows[label]))
        assert run.data.params["target"] == "embedded-7m"
        assert run.data.tags["specbench.method"] == rows[label].method
        assert run.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("uri", "code", "message"),
    [
        ("htp://127.0.0.1:5000", 2, "'htp://127.0.0.1:5000' begins with none of http, https, file"),
        ("127.0.0.1:5000", 2, "MLFLOW_TRACKING_URI '127.0.0.1:5000'"),
        ("localhost:5000", 2, "'localhost:5000' begins with none of http, https"),
        ("http://", 2, "'http://' has no host name"),
        ("http://host:99999", 2, "is not a valid address: Port out of range"),
        (
            "http://127.0.0.1:1",
            3,
            "no server answers at MLFLOW_TRACKING_URI http://127.0.0.1:1: Connection",
        ),
    ],
)
def test_invalid_mlflow_server_is_rejected_before_an_export(
    tmp_path, monkeypatch, capsys, uri, code, message
):
    class Silent(types.ModuleType):
        def MlflowClient(self, tracking_uri):  # noqa: N802
            raise AssertionError("MLflow was called")

    monkeypatch.setitem(sys.modules, "mlflow", Silent("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.ModuleType("mlflow.entities"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in trackers._MLFLOW_DEFAULTS:
        monkeypatch.setenv(name, "1")
    assert app._run(["export", str(RUN), "--mlflow", "--out", str(tmp_path)]) == code
    assert message in capsys.readouterr().err


def test_an_error_of_mlflow_is_one_line(tmp_path, monkeypatch, capsys):
    class Broken(types.ModuleType):
        def MlflowClient(self, tracking_uri):  # noqa: N802
            raise RuntimeError("500: out of order\n" + "traceback " * 1000)

    monkeypatch.setitem(sys.modules, "mlflow", Broken("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.ModuleType("mlflow.entities"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert app._run(["export", str(RUN), "--mlflow", "--out", str(tmp_path)]) == 3
    message = capsys.readouterr().err
    assert "MLflow at sqlite://" in message
    assert "RuntimeError: 500: out of order\n" in message
    assert len(message) < 1000
