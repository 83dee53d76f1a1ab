"""The folder of a run: manifest, prompts, records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from specbench_cli.errors import FULL, UsageError
from specbench_cli.store import jsonl
from specbench_cli.store.invariants import validate
from specbench_cli.store.lock import LOCK, Lock
from specbench_cli.store.schema import Record, from_json, to_json

RUNS = Path("results/runs")
"""Where runs go that are given no folder."""

_MANIFEST = "manifest.json"

_DRAFT = f".{_MANIFEST}.new"
"""What becomes the manifest; a process that was killed may leave it."""

ORDER = ".resume.json"
"""What was ordered, word for word: it may name folders of this machine, so it is not part of the
result and goes once the run is finished."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the models got it; a line of `prompts.jsonl`."""

    prompt_id: str
    cluster: str
    task: str
    family: str
    category: str
    turn: int
    text: str
    ids: list[int]


class RunDir:
    """A run's folder; make one with `create` or `open`.

    Attributes:
        path: the folder.
        manifest: what `manifest.json` holds.
        lock: the right to write here, for who must be the only one.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.lock: Lock | None = None

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], order: str | None = None) -> RunDir:
        """Start a run in a new or empty folder; its manifest says "running" until `close`.

        What a process left there that was killed while it did this counts as nothing.

        Args:
            order: what `ORDER` shall hold, by whom the folder is then held (`hold`); None for
                neither.
        Raises:
            UsageError: the folder holds a run or something else, cannot be written, or is held.
            OSError: the disk is full.
        """
        run = cls(path, {**manifest, "status": "running"})
        try:
            path.mkdir(parents=True, exist_ok=True)
            if order is not None:
                run.hold()
            run._begin(order)
        except OSError as error:
            run.release()
            if error.errno in FULL:
                raise
            raise UsageError(
                f"cannot write to {path}: {error.strerror}", hint="give another --out"
            ) from error
        except UsageError:
            run.release()
            raise
        return run

    def _begin(self, order: str | None) -> None:
        if self.holds_run(self.path):
            raise UsageError(
                f"{self.path} already holds a run",
                hint=f"specbench run --resume {self.path}, or give another --out",
            )
        if any(file.name not in (LOCK, ORDER, _DRAFT) for file in self.path.iterdir()):
            raise UsageError(
                f"{self.path} is not empty and holds no run", hint="give a new or empty --out"
            )
        if order is not None:  # first: a run that there is can be resumed
            with jsonl.naming(self.path / ORDER):
                (self.path / ORDER).write_text(order, encoding="utf-8")
        self._write_manifest()

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run that exists. Raises UsageError where there is none or its manifest is damaged."""
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"{path} holds no run (no readable {_MANIFEST})", hint="specbench list runs"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"{path / _MANIFEST} is damaged: {error}", hint="begin a new run: specbench run"
            ) from error
        if not isinstance(manifest, dict):
            raise UsageError(
                f"{path / _MANIFEST} is damaged: not an object",
                hint="begin a new run: specbench run",
            )
        return cls(path, manifest)

    def hold(self) -> None:
        """Be the folder's only writer until `release`, or until this process is gone.

        Raises:
            UsageError: another process is. OSError: the folder cannot be written to.
        """
        self.lock = Lock(self.path)

    def release(self) -> None:
        """Let other processes write into the folder."""
        if self.lock is not None:
            self.lock.release()

    @staticmethod
    def holds_run(path: Path) -> bool:
        """Whether a run was begun in a folder."""
        return (path / _MANIFEST).exists()

    def read(self) -> None:
        """Have the manifest as it is now. Raises what `open` does."""
        self.manifest = RunDir.open(self.path).manifest

    def resume(self) -> None:
        """Mark the run as running again."""
        self.update(status="running")

    def update(self, **facts: Any) -> None:
        """Put facts into the manifest, replacing what they said before."""
        self.manifest |= facts
        self._write_manifest()

    def close(self, status: Literal["finished", "interrupted"], **facts: Any) -> None:
        """Write the manifest a last time, with what is only known at the end."""
        self.update(**facts, status=status)

    def discard(self) -> None:
        """Remove a run that holds no record, and its folder if nothing else is in it."""
        for name in ("prompts.jsonl", "records.jsonl", ORDER, _MANIFEST):
            (self.path / name).unlink(missing_ok=True)
        self.release()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def append(self, records: Iterable[Record]) -> None:
        """Add records, on disk when this returns. Raises ValueError on an invalid record."""
        lines = []
        for record in records:
            validate(record)
            lines.append(to_json(record))
        jsonl.append(self.path / "records.jsonl", lines)

    def records(self) -> Iterator[Record]:
        """All complete records, in the order written.

        Raises:
            UsageError: a line that is no record, or one that contradicts itself; a second record
                of the same cell.
        """
        file, seen = self.path / "records.jsonl", set[tuple[str, int, str, int]]()
        for number, line in jsonl.read(file):
            try:
                record = from_json(line)
                validate(record)
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"{file}, line {number} is no record: {error}", hint=_mend(file, number)
                ) from error
            if record.key in seen:
                raise UsageError(
                    f"{file}, line {number}: a second record of {record.key}",
                    hint=_mend(file, number),
                )
            seen.add(record.key)
            yield record

    def append_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Add prompts, on disk when this returns."""
        lines = (json.dumps(asdict(prompt), separators=(",", ":")) for prompt in prompts)
        jsonl.append(self.path / "prompts.jsonl", lines)

    def prompts(self) -> Iterator[Prompt]:
        """All complete prompts, in the order written. Raises UsageError on a damaged line."""
        file = self.path / "prompts.jsonl"
        for number, line in jsonl.read(file):
            try:
                yield Prompt(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"{file}, line {number} is no prompt: {error}", hint=_mend(file, number)
                ) from error

    def _write_manifest(self) -> None:
        """Replace the manifest in one go: a reader sees the old one or the new one."""
        draft = self.path / _DRAFT
        with jsonl.naming(self.path / _MANIFEST), draft.open("w", encoding="utf-8") as file:
            json.dump(self.manifest, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / _MANIFEST)


def _mend(file: Path, number: int) -> str:
    """What to do about a damaged line: what it held can be made again."""
    return (
        f"delete that line: sed -i {number}d {shlex.quote(str(file))}; specbench run --resume"
        f" {shlex.quote(str(file.parent))} then makes what is missing"
    )


def new_path(
    name: str, config: Mapping[str, Any], root: Path = RUNS, now: datetime | None = None
) -> Path:
    """A folder that does not exist yet: `<root>/<utc>-<name>-<hash of the config>`."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "run"
    base = root / f"{stamp}-{slug}-{digest[:8]}"
    path, copy = base, 2
    while path.exists():
        path, copy = base.with_name(f"{base.name}-{copy}"), copy + 1
    return path


def latest(root: Path = RUNS) -> Path:
    """The run whose manifest was written last ("last" on the command line).

    Raises:
        UsageError: there is no run.
    """
    runs = [(file.stat().st_mtime_ns, file.parent) for file in root.glob(f"*/{_MANIFEST}")]
    if not runs:
        raise UsageError(f"there is no run in {root}", hint="specbench run")
    return max(runs)[1]
