"""Search for a dataset's file: next to its YAML, in $SPECBENCH_DATA, in the cache, or by download.

The returned content always has the configured checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from pathlib import Path

from specbench_cli.errors import EnvironmentFault
from specbench_cli.files import cache_folder
from specbench_cli.tasks.dataset_config import DatasetSource, HubSource
from specbench_cli.tasks.formats import UnreadableFile, read_limited

TIMEOUT_S = 10.0
"""Timeout of a server's answer in seconds."""

ALTERNATIVE = "or use a task without download: specbench run --task mini"


class _Unreachable(Exception):
    """Error for a failed download."""


def create_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. If it does not exist, create it atomically first.

    One process creates the folder while other processes wait. An incomplete folder from an
    interrupted process is removed.

    Args:
        write: function that creates a folder with its content at a path.

    Raises:
        OSError: the folder cannot be written.
    """
    from filelock import FileLock

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_suffix(".part")
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            shutil.rmtree(part, ignore_errors=True)
            try:
                write(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def is_offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids network access."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def sha256(data: bytes) -> str:
    """Return the SHA-256 of data in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_source(task: str, source: DatasetSource, folder: Path, obtain: str = "") -> bytes:
    """Return the content of a dataset's file, decompressed if it is gzipped.

    Args:
        task: name of the task for messages.
        folder: folder of the dataset's YAML.
        obtain: how the user can get data that cannot be downloaded, for the error message.

    Raises:
        EnvironmentFault: the file cannot be found, or has a wrong checksum.
    """
    own = os.environ.get("SPECBENCH_DATA")
    for place in [folder, *([Path(own)] if own else [])]:
        for path in (place / source.file, place / f"{source.file}.gz"):
            if path.is_file():
                return _read_local(task, source, path)
    # The cache key must differ between datasets, revisions and splits.
    key = source.sha256 or sha256(source.model_dump_json(include={"hub", "member"}).encode())
    cached = cache_folder() / "tasks" / key[:16] / source.file
    if cached.is_file():
        data = cached.read_bytes()
        if source.sha256 in (None, sha256(data)):
            return data
    data = _download(task, source, own, obtain)
    _write(cached, data)
    return data


def read_file(path: Path) -> bytes:
    """Return the content of a user's file, decompressed if gzipped.

    Raises:
        UnreadableFile: the file is damaged.
    """
    try:
        return _decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as fault:
        raise UnreadableFile(f"it cannot be read: {fault}") from fault


def _read_local(task: str, source: DatasetSource, path: Path) -> bytes:
    hint = "replace it by the original file, or unset SPECBENCH_DATA to download it"
    try:
        data = _decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as fault:
        raise EnvironmentFault(f"{task}: {path} cannot be read: {fault}", hint) from fault
    if source.sha256 not in (None, sha256(data)):
        raise EnvironmentFault(
            f"{task}: {path} has sha256 {sha256(data)}, expected {source.sha256}", hint
        )
    return data


def _decompress(data: bytes) -> bytes:
    """Return data, decompressed if gzipped. Raise OSError, EOFError or zlib.error if damaged."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return read_limited(file)


def _download(task: str, source: DatasetSource, own: str | None, obtain: str) -> bytes:
    sources: list[tuple[str, Callable[[], bytes]]] = []
    if url := source.url:
        sources.append((url, lambda: _download_url(url)))
    if hub := source.hub:
        sources.append((f"the hub's {hub.id}", lambda: _download_from_hub(hub)))
    failures = [] if sources else ["its YAML names no url or hub to download from"]
    for name, fetch in sources:
        try:
            data = _decompress(fetch())
        except (_Unreachable, OSError, EOFError, zlib.error) as fault:
            failures.append(f"{name} failed: {fault}")
            continue
        if source.sha256 in (None, sha256(data)):
            return data
        failures.append(f"{name} has sha256 {sha256(data)}, expected {source.sha256}")
    place = f"in SPECBENCH_DATA ({own})" if own else "in SPECBENCH_DATA (not set)"
    address = source.url or (source.hub.url if source.hub else None)
    zipped = ".gz" if address and address.endswith(".gz") else ""
    command = f" (curl -L -o {source.file}{zipped} {address})" if address else ""
    raise EnvironmentFault(
        f"{task}: {source.file} is neither {place} nor cached; " + "; ".join(failures),
        (obtain and f"{obtain}; then ")
        + f"set SPECBENCH_DATA to a folder with {source.file}{command}, {ALTERNATIVE}",
    )


def _download_url(url: str) -> bytes:
    if is_offline():
        raise _Unreachable("HF_HUB_OFFLINE is set")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bytes(response.read())
    except (OSError, HTTPException) as fault:
        raise _Unreachable(str(fault)) from fault


def _download_from_hub(hub: HubSource) -> bytes:
    """Return the content of a file on the hub, or the rows of a split as JSON Lines."""
    try:
        if hub.path is not None:
            return _download_file(hub, hub.path)
        _check_hub(hub)
        from datasets import load_dataset

        rows = load_dataset(hub.id, hub.config, split=hub.split, revision=hub.revision)
    except Exception as fault:  # the hub, its cache and the network fail in many unrelated types
        raise _Unreachable(str(fault).strip().partition("\n")[0] or type(fault).__name__) from fault
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _download_file(hub: HubSource, path: str) -> bytes:
    """Return a file of the dataset's repository, from the hub's cache if possible."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch = partial(hf_hub_download, hub.id, path, repo_type="dataset", revision=hub.revision)
    try:
        found = fetch(local_files_only=True)
    except LocalEntryNotFoundError:
        if is_offline():
            raise _Unreachable("HF_HUB_OFFLINE is set") from None
        _check_hub(hub)
        found = fetch()
    return Path(found).read_bytes()


def _check_hub(hub: HubSource) -> None:
    """Raise an error if the Hugging Face hub does not answer in time.

    Without this check, a download from an unreachable hub would retry for half a minute.
    """
    from huggingface_hub import HfApi

    if not is_offline():
        HfApi().dataset_info(hub.id, revision=hub.revision, timeout=TIMEOUT_S)


def _write(path: Path, data: bytes) -> None:
    """Write a cache file atomically, so that an interrupted download leaves no incomplete file."""
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
