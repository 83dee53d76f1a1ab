"""Finds a dataset's file: beside its YAML, in $SPECBENCH_DATA, in the cache, or by download.

Whatever is returned has the card's checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from specbench_cli.errors import EnvironmentFault
from specbench_cli.tasks.schema import Hub, Source

TIMEOUT_S = 10.0
"""Longest silence of a server before a download is given up."""

INSTEAD = "or run what needs no download: specbench run --task mini"


class _Unreachable(Exception):
    """Why one way to the data failed."""


def cache_folder() -> Path:
    """$SPECBENCH_CACHE, else the user's cache folder (XDG)."""
    if own := os.environ.get("SPECBENCH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbench"


def offline() -> bool:
    """Whether the environment forbids the network, by the hub's own variable."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def sha256(data: bytes) -> str:
    """The checksum in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_source(task: str, source: Source, folder: Path) -> bytes:
    """The dataset's file.

    Args:
        task: the task's name, for messages.
        folder: the folder of the YAML.

    Raises:
        EnvironmentFault: it is nowhere, or the copy found has another checksum.
    """
    own = os.environ.get("SPECBENCH_DATA")
    for place in [folder, *([Path(own)] if own else [])]:
        path = place / source.file
        if path.is_file():
            data = path.read_bytes()
            if source.sha256 not in (None, sha256(data)):
                raise EnvironmentFault(
                    f"{task}: {path} has sha256 {sha256(data)}, expected {source.sha256}",
                    "replace it by the original file, or unset SPECBENCH_DATA to download it",
                )
            return data
    key = source.sha256 or (source.hub.revision if source.hub else "")
    cached = cache_folder() / "tasks" / key[:16] / source.file
    if cached.is_file():
        data = cached.read_bytes()
        if source.sha256 in (None, sha256(data)):
            return data
    data = _download(task, source, own)
    _write(cached, data)
    return data


def _download(task: str, source: Source, own: str | None) -> bytes:
    ways: list[tuple[str, Callable[[], bytes]]] = []
    if url := source.url:
        ways.append((url, lambda: _from_url(url)))
    if hub := source.hub:
        ways.append((f"the hub's {hub.id}", lambda: _from_hub(hub)))
    failures = [] if ways else ["its YAML names no url or hub to download from"]
    for name, way in ways:
        try:
            data = way()
        except _Unreachable as fault:
            failures.append(f"{name} failed: {fault}")
            continue
        if source.sha256 in (None, sha256(data)):
            return data
        failures.append(f"{name} has sha256 {sha256(data)}, expected {source.sha256}")
    place = f"in SPECBENCH_DATA ({own})" if own else "in SPECBENCH_DATA (not set)"
    fetch = f" (curl -L -o {source.file} {source.url})" if source.url else ""
    raise EnvironmentFault(
        f"{task}: {source.file} is neither {place} nor cached; " + "; ".join(failures),
        f"set SPECBENCH_DATA to a folder with {source.file}{fetch}, {INSTEAD}",
    )


def _from_url(url: str) -> bytes:
    if offline():
        raise _Unreachable("HF_HUB_OFFLINE is set")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bytes(response.read())
    except (OSError, HTTPException) as fault:
        raise _Unreachable(str(fault)) from fault


def _from_hub(hub: Hub) -> bytes:
    """The split as JSON lines, keys in the dataset's order."""
    from datasets import load_dataset
    from huggingface_hub import HfApi

    try:
        if not offline():  # asked with a limit first: `load_dataset` retries for half a minute
            HfApi().dataset_info(hub.id, revision=hub.revision, timeout=TIMEOUT_S)
        rows = load_dataset(hub.id, hub.config, split=hub.split, revision=hub.revision)
    except Exception as fault:  # the hub, its cache and the network fail in many unrelated types
        raise _Unreachable(str(fault).strip().partition("\n")[0] or type(fault).__name__) from fault
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write(path: Path, data: bytes) -> None:
    """Write a cache file whole or not at all, so that an interrupted download leaves none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(data)
        Path(part.name).replace(path)
    except OSError as fault:
        raise EnvironmentFault(
            f"cannot write the cache {path.parent}: {fault.strerror or fault}",
            "set SPECBENCH_CACHE to a folder that can be written",
        ) from fault
