"""Export of a run to Weights & Biases or MLflow, with one tracker run per method.

Nothing is uploaded to Weights & Biases: its files are written offline, and `wandb sync` uploads
them. MLflow gets a database in the folder, unless MLFLOW_TRACKING_URI names a server. A second
export of a run creates no second tracker run. The packages of both trackers are optional.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_cli.config.problems import shorten
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.files import check_no_link
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.metrics import MethodSummary

ANSWER_S = 5.0
"""Timeout in seconds to connect to a server."""
_MLFLOW_DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Environment variables with MLflow's timeout and retries, set if the user has not set them."""
_SCHEMES = (
    *("http", "https", "file", "sqlite", "mysql", "postgresql", "mssql"),
    *("databricks", "databricks-uc", "uc"),
)
"""URI schemes that MLflow accepts."""
PROJECT = "specbench"
"""Name of the W&B project and of the MLflow experiment for all exported runs."""


def track(run: RunDir, folder: Path, tracker: str) -> list[str]:
    """Export every method of a run to a tracker.

    Args:
        folder: Parent of the folder with the tracker's files.
        tracker: A key of `TRACKERS`.

    Returns:
        The commands to type next.

    Raises:
        EnvironmentFault: The tracker's package is not installed.
    """
    for place in (folder / tracker, folder / tracker / "mlflow.db"):
        check_no_link(place)
    rows = read_report_data(run).summary.rows
    return TRACKERS[tracker](run, rows, folder / tracker)


def _wandb(run: RunDir, rows: tuple[MethodSummary, ...], folder: Path) -> list[str]:
    wandb = _package("wandb", "wandb")
    folder.mkdir(parents=True, exist_ok=True)
    silent = wandb.Settings(  # this may not be the machine that was measured
        silent=True,
        console="off",
        disable_git=True,
        host="",
        x_disable_meta=True,
        x_disable_stats=True,
    )
    for row in rows:
        made = wandb.init(
            project=PROJECT,
            id=_id(run, row),
            name=row.label,
            group=run.path.name,
            job_type=row.method,
            tags=list(_tags(run, row).values()),
            config=_config(run, row),
            dir=folder,
            mode="offline",
            reinit="finish_previous",
            settings=silent,
        )
        made.summary.update(_metrics(row))
        made.finish()
    return [f"wandb sync {folder / 'wandb'}/offline-run-*"]


def _mlflow(run: RunDir, rows: tuple[MethodSummary, ...], folder: Path) -> list[str]:
    mlflow = _package("mlflow", "mlflow")
    entities = _package("mlflow.entities", "mlflow")
    folder.mkdir(parents=True, exist_ok=True)
    server = os.environ.get("MLFLOW_TRACKING_URI")
    uri = server or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    if server:
        _check_server(server)
    try:
        _log_rows(mlflow.MlflowClient(tracking_uri=uri), entities, run, rows, folder)
    except (OSError, SpecbenchError):
        raise
    except Exception as fault:
        raise EnvironmentFault(
            f"MLflow at {uri} did not accept the methods:"
            f" {type(fault).__name__}: {_first_line(fault)}",
            "set MLFLOW_TRACKING_URI to a running server (http://host:5000), or unset it to write"
            " to a file",
        ) from fault
    return [f"mlflow ui --backend-store-uri {uri}"]


def _log_rows(
    client: Any, entities: Any, run: RunDir, rows: tuple[MethodSummary, ...], folder: Path
) -> None:
    """Log the methods that MLflow does not have yet."""
    server = os.environ.get("MLFLOW_TRACKING_URI")
    known = client.get_experiment_by_name(PROJECT)
    beside = None if server else (folder / "artifacts").resolve().as_uri()
    experiment = known.experiment_id if known else client.create_experiment(PROJECT, beside)
    began, ended = (_ms(run.manifest.get(name)) for name in ("created_utc", "finished_utc"))
    for row in rows:
        tags = {"specbench.id": _id(run, row), **_tags(run, row)}
        mine = f"tags.`specbench.id` = '{tags['specbench.id']}'"
        if client.search_runs([experiment], mine, max_results=1):
            continue
        made = client.create_run(experiment, began, tags, run_name=row.label).info.run_id
        client.log_batch(
            made,
            metrics=[
                entities.Metric(name, value, ended or began, 0)
                for name, value in _metrics(row).items()
            ],
            params=[
                entities.Param(name, str(value)[:500]) for name, value in _config(run, row).items()
            ],
        )
        client.set_terminated(made, "FINISHED", ended)


def _check_server(uri: str) -> None:
    """Check that the server of MLFLOW_TRACKING_URI accepts a connection.

    Without this check, MLflow would try to connect for many minutes.

    Raises:
        UsageError: The URI is not a valid address.
        EnvironmentFault: No server answers.
    """
    hint = "set it to a running server (http://host:5000), or unset it to write to a file"
    try:
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError as fault:
        raise UsageError(
            f"MLFLOW_TRACKING_URI {uri!r} is not a valid address: {fault}", hint
        ) from fault
    is_path = not parts.scheme and ":" not in uri
    if not is_path and parts.scheme.partition("+")[0] not in _SCHEMES:
        raise UsageError(
            f"MLFLOW_TRACKING_URI {uri!r} begins with none of {', '.join(_SCHEMES)}", hint
        )
    if parts.scheme not in ("http", "https"):
        return
    if not parts.hostname:
        raise UsageError(f"MLFLOW_TRACKING_URI {uri!r} has no host name", hint)
    for name, value in _MLFLOW_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        socket.create_connection((parts.hostname, port), timeout=ANSWER_S).close()
    except OSError as fault:
        raise EnvironmentFault(
            f"no server answers at MLFLOW_TRACKING_URI {uri}: {fault.strerror or fault}", hint
        ) from fault


def _first_line(fault: Exception) -> str:
    return shorten(str(fault).strip().partition("\n")[0])


def _metrics(row: MethodSummary) -> dict[str, float]:
    """Return the metrics of a method that are finite numbers."""
    return {
        name: float(value)
        for name, value in asdict(row).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _config(run: RunDir, row: MethodSummary) -> dict[str, Any]:
    """Return the method's parameters and the run's settings. Lists and mappings are omitted."""
    settings: Mapping[str, Any] = run.manifest["config"]["effective"]
    single = {
        name: value
        for name, value in settings.items()
        if value is None or isinstance(value, str | int | float)
    }
    return {**single, **{f"{row.method}.{name}": value for name, value in row.params.items()}}


def _tags(run: RunDir, row: MethodSummary) -> dict[str, str]:
    """Return the tags of a tracker run: the run, method, guarantee and machine."""
    return {
        "specbench.run": run.path.name,
        "specbench.method": row.method,
        "specbench.guarantee": row.guarantee,
        "specbench.machine": str(run.manifest.get("machine", {}).get("id", "unknown")),
        "specbench.outputs": "broken" if row.broken else "as promised",
    }


def _id(run: RunDir, row: MethodSummary) -> str:
    """Return an id for a method of a run. It is the same for every export."""
    return hashlib.sha256(f"{run.path.name}\0{row.label}".encode()).hexdigest()[:16]


def _ms(time: str | None) -> int | None:
    """Convert an ISO 8601 time to milliseconds since 1970."""
    return None if time is None else int(datetime.fromisoformat(time).timestamp() * 1000)


def _package(name: str, extra: str) -> Any:
    """Import the Python package of a tracker.

    Args:
        extra: Extra of specbench that installs the package.

    Raises:
        EnvironmentFault: The package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as fault:
        raise EnvironmentFault(
            f"the Python package {str(fault.name).partition('.')[0]!r} is not installed",
            f"pip install 'specbench-cli[{extra}]'",
        ) from fault


TRACKERS: dict[str, Callable[[RunDir, tuple[MethodSummary, ...], Path], list[str]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""Tracker name -> function that exports the methods and returns the next commands."""
