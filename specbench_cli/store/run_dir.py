"""Folder of a run. This module reads and writes its manifest, prompts and records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from specbench_cli import files
from specbench_cli.config.arrivals import count_loads
from specbench_cli.config.problems import format_first_problem, is_one_line
from specbench_cli.errors import FULL, ConcurrentWriteError, SpecbenchError, UsageError
from specbench_cli.store import jsonl, matrix, pieces
from specbench_cli.store.digests import FOREIGN_LINE, FileSeal, seal, short_digest
from specbench_cli.store.invariants import (
    RunFacts,
    SharedFacts,
    check_agreement,
    shared_facts,
    validate,
)
from specbench_cli.store.lock import LOCK, Lock, SharedLock, is_lock
from specbench_cli.store.manifest import RESUME_FILE, damaged_error, parse
from specbench_cli.store.pieces import RecordReader, check_line, invalid_record_error, repair_hint
from specbench_cli.store.schema import (
    STRICT,
    Count,
    Family,
    Name,
    Record,
    RecordKey,
    from_json,
    to_json,
)

T = TypeVar("T")

RUNS = Path("results/runs")
"""Default parent folder of runs."""

_OTHER_FOLDERS = ".elsewhere"
"""File in `RUNS` that lists the runs in other folders, one path per line."""

_MANIFEST = "manifest.json"
_RECORDS, _PROMPTS = "records.jsonl", "prompts.jsonl"

MOST_BYTES = 256 * files.MB
"""Maximum size of a manifest in bytes."""

_HALF_OBJECT = re.compile(rb'\{\s*"(?!.*\}\s*\Z)', re.DOTALL)
"""Pattern of an incomplete JSON object, as a killed process may leave it."""

COSTS = "costs-{}.json"
"""Name of the file with the costs probed between the prompts of a repeat; `{}` is its number."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt (a turn of a question) with its token ids. It is a line of `prompts.jsonl`."""

    __pydantic_config__ = STRICT

    prompt_id: Name
    cluster: str
    task: Name
    family: Family
    category: str
    turn: Annotated[Count, Field(ge=1)]
    text: str
    ids: list[Count]


@cache
def _prompt_adapter() -> TypeAdapter[Prompt]:
    return TypeAdapter(Prompt)


class _RecordPrompt(TypedDict):
    """Field of a record that contains its prompt id. Other fields are ignored."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[misc]

    prompt_id: Name


class _RecordHeader(TypedDict):
    """Fields of a record that `RunDir.read_output_ids` needs. Other fields are ignored."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[misc]

    prompt_id: Name
    turn: Count
    label: Name
    pass_: Annotated[Count, Field(alias="pass")]
    seed: Count
    output_ids: list[Count] | None


class _RecordConsistency:
    """Checker that the records of a file neither contradict nor repeat each other."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen = set[RecordKey]()
        self._facts: dict[str, tuple[object, ...]] = {}

    def check(self, number: int, key: RecordKey, own: SharedFacts) -> None:
        """Raise UsageError if a record contradicts or repeats an earlier record.

        Args:
            number: line number of the record.
            key: key of the record.
            own: facts of the record with which other records must agree.
        """
        try:
            check_agreement(own, self._facts)
        except ValueError as error:
            raise invalid_record_error(self.file, number, error) from error
        if key in self._seen:
            raise _duplicate_error(self.file, number, key)
        self._seen.add(key)


class RunDir:
    """Folder of a run. Use `create` or `open` to construct this object.

    Attributes:
        path: the folder.
        manifest: content of `manifest.json`.
        lock: lock that gives this process the exclusive right to write to the folder.
        resume_config: configuration of the run, which the file `RESUME_FILE` stores. If the run is
            interrupted and the file is missing, it is written again. None disables this.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.lock: Lock | None = None
        self.resume_config: str | None = None
        self._watched: Lock | SharedLock | None = None
        self._sizes: dict[str, int] = {}  # sizes in bytes of the files that are appended to
        self._answered: dict[RecordKey, list[int] | None] | None = None
        # File name -> digest of a record's or prompt's key -> digest of its line. It has all lines
        # of the run.
        self._digests: dict[str, dict[str, str]] = {_RECORDS: {}, _PROMPTS: {}}
        self._merge_digests()
        self._seals: dict[str, FileSeal] = {}

    @classmethod
    def create(
        cls, path: Path, manifest: Mapping[str, Any], resume_config: str | None = None
    ) -> RunDir:
        """Start a run in a new or empty folder.

        The status in the manifest is "running" until `close`. If a process was killed during
        `create`, it may have left files in the folder. Such files are ignored.

        Args:
            resume_config: content of `RESUME_FILE`. If it is given, this process also locks the
                folder.

        Raises:
            UsageError: the folder contains a run or other files, cannot be written, or is locked.
            OSError: the disk is full.
        """
        run = cls(path, {**manifest, "status": "running"})
        run.resume_config = resume_config
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._check_empty()  # before the lock is created in the user's folder
            if resume_config is not None:
                run.acquire_lock()
            run._begin(resume_config)
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
                f"{self.path} already contains a run",
                hint=f"specbench run --resume {self.path}, or choose another --out",
            )
        self._check_empty()
        if order is not None:  # write this first, so that every existing run can be resumed
            files.replace(self.path / RESUME_FILE, order)
        self._write_manifest()

    def _check_empty(self) -> None:
        """Raise UsageError if the folder is not empty.

        Files that a process left when it was killed during `create` are ignored.
        """
        if not self.holds_run(self.path) and not all(map(_is_leftover, self.path.iterdir())):
            raise UsageError(
                f"{self.path} is not empty, but contains no run",
                hint="choose a new or empty folder with --out",
            )

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run. Raise UsageError if it is missing or its manifest is damaged."""
        try:
            manifest = parse(files.read_text(path / _MANIFEST, MOST_BYTES))
        except OSError as error:
            if matrix.is_matrix(path):
                held = [str(each) for each in matrix.run_folders(path) if cls.holds_run(each)]
                raise UsageError(
                    f"{path} contains several runs, one for each target and draft",
                    hint=f"name one of them: {', '.join(held) or 'none is started yet'}",
                ) from error
            raise UsageError(
                f"{path} contains no run (no readable {_MANIFEST})", hint="specbench list runs"
            ) from error
        except ValueError as error:
            raise damaged_error(path / _MANIFEST, error) from error
        return cls(path, manifest)

    def acquire_lock(self) -> None:
        """Lock the folder. The lock lasts until `release`, or until this process ends.

        Raises:
            UsageError: another process has the lock.
            OSError: the folder cannot be written to.
        """
        self.lock = self._watched = Lock(self.path)
        for file in self.path.iterdir():
            if _is_temporary(file):  # a killed process left it
                file.unlink(missing_ok=True)

    def remove_dead_lock(self) -> None:
        """Remove the lock file of a process that was killed after it finished the run."""
        if (self.path / LOCK).exists():
            with contextlib.suppress(
                UsageError
            ):  # its process is alive, or specbench did not write the file
                Lock(self.path).release()

    def share_parent_lock(self) -> None:
        """Let this object write only while the parent process has the lock of the folder.

        Raises:
            ConcurrentWriteError: the parent process does not have the lock.
        """
        self._watched = SharedLock(self.path)

    def share_lock_of(self, run: RunDir) -> None:
        """Let this object write only while another run has the lock of that run's own folder.

        Args:
            run: the run whose folder contains this folder.
        """
        self._watched = run._watched

    def check_lock(self) -> None:
        """Raise ConcurrentWriteError if this process no longer has the lock of the folder."""
        if self._watched is not None:
            self._watched.check()

    def release(self) -> None:
        """Release the lock, so that other processes can write to the folder."""
        if self.lock is not None:
            self.lock.release()
            self.lock = self._watched = None

    @staticmethod
    def holds_run(path: Path) -> bool:
        """Return True if a run was started in the folder."""
        return (path / _MANIFEST).exists()

    def read(self) -> None:
        """Read the manifest again. Other processes of the run may have changed it.

        Raises:
            UsageError: the manifest is missing or damaged.
            ConcurrentWriteError: the file is now the manifest of another run.
        """
        found = RunDir.open(self.path).manifest
        began, now = (each.get("created_utc") for each in (self.manifest, found))
        if began != now:
            raise ConcurrentWriteError(
                f"{self.path / _MANIFEST} is the manifest of another run: that run began at {now},"
                f" this one at {began}",
                hint=f"specbench run --resume {shlex.quote(str(self.path))}",
            )
        self.manifest = found
        self._merge_digests()

    def _merge_digests(self) -> None:
        """Add the digests of lines that other processes of the run have stored in the manifest."""
        for name, found in (self.manifest.get("line_digests") or {}).items():
            self._digests[name] = self._digests.get(name, {}) | found

    def mark_running(self) -> None:
        """Mark a run that was interrupted or finished as running again."""
        self.update(status="running")

    def update(self, **facts: Any) -> None:
        """Store facts in the manifest. They replace earlier values of the same keys."""
        self.manifest |= facts
        self._write_manifest()

    def remove_resume_config(self) -> None:
        """Remove the file with the configuration, which is needed only to resume the run."""
        files.remove_own(self.path / RESUME_FILE, _is_order)

    def close(self, status: Literal["finished", "interrupted"], **facts: Any) -> None:
        """Write the final manifest. It includes facts that are known only at the end of the run."""
        if status == "finished" and self._watched is not None:
            self.manifest.pop("line_digests", None)
            facts["files"] = self._seals or self._seal()
        self.update(**facts, status=status)
        if (
            status == "interrupted"
            and self.resume_config
            and not os.path.lexists(self.path / RESUME_FILE)
        ):
            files.replace(self.path / RESUME_FILE, self.resume_config)

    def discard(self) -> None:
        """Remove a run without records, and its folder if it contains no other files."""
        self.check_lock()
        for name in (_PROMPTS, _RECORDS, RESUME_FILE, _MANIFEST):
            files.remove_own(self.path / name)
        self.release()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def append(self, records: Iterable[Record]) -> None:
        """Append records to the file with the records. When this returns, they are on disk.

        Raises:
            ValueError: a record is invalid.
            ConcurrentWriteError: another program wrote to the file, or may write to it.
        """
        records, lines = list(records), []
        for record in records:
            line = to_json(record)
            validate(from_json(line))  # never write a line that cannot be read back
            lines.append(line)
        self._append(_RECORDS, lines, [record.key for record in records])
        if self._answered is not None:
            self._answered |= {record.key: record.output_ids for record in records}

    def read_output_ids(self) -> Mapping[RecordKey, list[int] | None]:
        """Return the token ids of every record, by the key of the record.

        The file is read only once. This is five times faster than `records`, because most fields
        are not checked. Records that another process adds later are not included.

        Raises:
            UsageError: a line is not a record, or another program changed or added it. Or two
                records have the same key, or a prompt is damaged.
        """
        if self._answered is None:
            self._adopt_prompts()
            digests = self._digests[_RECORDS]
            self._answered, self._digests[_RECORDS] = {}, {}  # forget the digests of deleted lines
            for number, key, line, ids in self._record_headers():
                try:
                    check_line(key, line, digests, complete=self._is_complete)
                except ValueError as error:
                    raise invalid_record_error(self.path / _RECORDS, number, error) from error
                self._answered[key] = ids
                self._digests[_RECORDS][short_digest(key)] = short_digest(line)
        return self._answered

    def reread_output_ids(self) -> Mapping[RecordKey, list[int] | None]:
        """Read the file again, and return the token ids of every record, by the key of the record.

        Records that other processes have added are included.

        Raises:
            UsageError: see `read_output_ids`.
            ConcurrentWriteError: another program changed or added a record during the run.
        """
        self._seals = self._seal()  # seal first, so that readers notice a later change
        digests, foreign = self._digests[_RECORDS], list[tuple[int, ValueError]]()
        self._answered = {}
        for number, key, line, ids in self._record_headers():
            try:
                check_line(key, line, digests, complete=self._watched is not None)
            except ValueError as error:
                foreign.append((number, error))
                digests.setdefault(short_digest(key), FOREIGN_LINE)
            self._answered[key] = ids
        if foreign:
            (number, why), file = foreign[0], self.path / _RECORDS
            raise ConcurrentWriteError(
                f"{file} has {len(foreign)} records that this run did not write; the first one in"
                f" line {number}: {why}",
                hint=repair_hint(file, number),
            )
        return self._answered

    @property
    def has_records(self) -> bool:
        """Return True if the file with the records is not empty."""
        file = self.path / _RECORDS
        return file.is_file() and file.stat().st_size > 0

    def has_written(self, key: RecordKey) -> bool:
        """Return True if a process of this run wrote the record with a key, or has read it."""
        return short_digest(key) in self._digests[_RECORDS]

    def store_line_digests(self) -> None:
        """Store digests of lines without a digest, which a killed process of this run wrote."""
        for _, key, line, _ in self._record_headers():
            self._digests[_RECORDS].setdefault(short_digest(key), short_digest(line))
        self._adopt_prompts()

    def _adopt_prompts(self) -> None:
        """Check all prompts, and store a digest of each prompt that has no digest yet."""
        digests = self._digests[_PROMPTS]
        for prompt, line in self._prompt_lines(digests, complete=self._is_complete):
            digests.setdefault(short_digest((prompt.prompt_id, prompt.turn)), short_digest(line))

    def _record_headers(self) -> Iterator[tuple[int, RecordKey, str, list[int] | None]]:
        """Return the line number, key, line and token ids of every record.

        Raises:
            UsageError: a line is not a record. Or two records have the same key. Or the run does
                not have the repeat or the seed of a record.
        """
        file, seen, known = self.path / _RECORDS, set[RecordKey](), self._planned_facts()
        # Store the size of the file before reading it. If another process then writes, the next
        # append finds a different size and fails.
        self._sizes[file.name] = file.stat().st_size if file.exists() else 0
        for number, line in jsonl.read(file):
            try:
                header = _header_adapter().validate_json(line)
                known.check_plan(header["pass_"], header["seed"])
            except ValueError as error:
                why = format_first_problem(error) if isinstance(error, ValidationError) else error
                raise invalid_record_error(file, number, why) from error
            key = header["prompt_id"], header["turn"], header["label"], header["pass_"]
            if key in seen:
                raise _duplicate_error(file, number, key)
            seen.add(key)
            yield number, key, line, header["output_ids"]

    def unplanned_record_error(self, key: RecordKey) -> UsageError:
        """Return the error for a record that does not belong to the plan of the run."""
        file = self.path / _RECORDS
        number = next(n for n, found, _, _ in self._record_headers() if found == key)
        prompt, turn, label, pass_ = key
        return invalid_record_error(
            file,
            number,
            f"the run has no prompt {prompt} with turn {turn}, method {label} and pass {pass_}",
        )

    def records(self, prompt_ids: Container[str] | None = None) -> Iterator[Record]:
        """Return all complete records, in the order in which they were written.

        Args:
            prompt_ids: return only the records of these prompts. This is up to five times faster,
                because other lines are not checked. None returns all records.

        Raises:
            UsageError: a line is not a valid record. Or a record contradicts another record, the
                manifest or its prompt. Or two records have the same key. Or a prompt is damaged.
        """
        self._check_seal(_PROMPTS, self._prompt_lines)
        self._check_seal(_RECORDS, self._records)
        yield from self._records(prompt_ids)

    def _records(self, of: Container[str] | None = None) -> Iterator[Record]:
        reader, order = self._reader(), _RecordConsistency(self.path / _RECORDS)
        for number, line in jsonl.read(order.file):
            if of is not None and not _may_belong_to(line, of):
                continue
            record = reader.record(number, line)
            order.check(number, record.key, shared_facts(record))
            yield record

    def map_records(self, make: Callable[[Record], T]) -> Iterator[T]:
        """Return the result of a function for every record, in the order of the file.

        Several processes read a large file in parallel.

        Args:
            make: the function. It must be at the top level of a module, so that it can be pickled.

        Raises:
            UsageError: see `records`.
        """
        self._check_seal(_PROMPTS, self._prompt_lines)
        self._check_seal(_RECORDS, self._records)
        order = _RecordConsistency(self.path / _RECORDS)
        for read in pieces.read_records(self._reader(), make):
            order.check(read.line, read.key, read.facts)
            yield read.value

    def _reader(self) -> RecordReader:
        return RecordReader(
            self.path / _RECORDS,
            self._run_facts(),
            self._vocabulary(),
            self._digests[_RECORDS],
            self._is_complete,
        )

    @property
    def _is_complete(self) -> bool:
        """Return True if the manifest has a digest of every line that the run wrote.

        If a run was killed, some of its lines may have no digest.
        """
        return self.manifest.get("status") == "interrupted" and "line_digests" in self.manifest

    def _seal(self) -> dict[str, FileSeal]:
        """Return the size and the SHA-256 of the file with records and of the file with prompts."""
        found = {name: seal(self.path / name) for name in (_RECORDS, _PROMPTS)}
        return {name: each for name, each in found.items() if each is not None}

    def _is_changed(self, name: str) -> bool:
        """Return True if a file has changed since the run was finished.

        A removed or emptied file does not count as changed, because it contains nothing wrong.
        """
        expected = self.manifest.get("files")
        if not expected or self.manifest.get("status") != "finished":
            return False
        found = seal(self.path / name)
        return found is not None and found["bytes"] > 0 and found != expected.get(name)

    def _check_seal(self, name: str, read: Callable[[], Iterator[Any]]) -> None:
        """Raise UsageError if a file has changed since the run was finished.

        Args:
            name: name of the file.
            read: function that reads the file. If it raises an error, this error is raised, because
                it names the changed line.
        """
        if not self._is_changed(name):
            return
        force = f"specbench run --resume {shlex.quote(str(self.path))} --force"
        ways = f"restore {name} from a copy; start a new run: specbench run; or "
        try:
            deque(read(), maxlen=0)
        except UsageError as error:
            delete = (error.hint or "").partition(";")[0]
            raise UsageError(
                error.message, f"{ways}{delete}, and accept a label on the run: {force}"
            ) from error
        raise UsageError(
            f"{self.path / name} was changed after the run was finished: its SHA-256 is not the one"
            f" in {_MANIFEST}",
            f"{ways}accept the change, with a label on the run: {force}",
        )

    def accept_changes(self) -> None:
        """Accept changes of a finished run's files, so that the files can be read again.

        The manifest then labels the run as mixed.

        Raises:
            UsageError: a file contains a line that is not valid.
        """
        changed = [name for name in (_RECORDS, _PROMPTS) if self._is_changed(name)]
        if not changed:
            return
        deque(self._records(), maxlen=0)
        words = [f"{name} (changed after the run was finished)" for name in changed]
        self.update(files=self._seal(), mixed=[*(self.manifest.get("mixed") or []), *words])

    def _planned_facts(self) -> RunFacts:
        """Return facts from the manifest: the random seed, and the numbers of repeats and loads."""
        effective = (self.manifest.get("config") or {}).get("effective") or {}
        loads = None
        with contextlib.suppress(ValueError):
            loads = count_loads(effective.get("load") or "")
        repeats = effective.get("repeats")
        return RunFacts(
            repeats=repeats, loads=None if repeats is None else loads, seed=effective.get("seed")
        )

    def _run_facts(self) -> RunFacts:
        """Return the facts with which records must agree, from the manifest and the prompts."""
        manifest = self.manifest
        return replace(
            self._planned_facts(),
            methods={row["label"]: row.get("method") for row in manifest.get("rows") or ()},
            tasks={task["name"] for task in manifest.get("tasks") or ()},
            prompts={
                (each.prompt_id, each.turn): (each.task, each.cluster, each.family, each.category)
                for each in self._checked_prompts()
            },
            workers=set(manifest.get("workers") or ()),
        )

    def append_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Append prompts to the file with the prompts. When this returns, they are on disk."""
        prompts = list(prompts)
        lines = [json.dumps(asdict(prompt), separators=(",", ":")) for prompt in prompts]
        self._append(_PROMPTS, lines, [(prompt.prompt_id, prompt.turn) for prompt in prompts])

    def _append(self, name: str, lines: Sequence[str], keys: Sequence[object]) -> None:
        """Append lines to a file.

        If the folder is locked, check that no other process wrote to the file.
        """
        self.check_lock()
        if self._watched is not None:  # before writing: a full disk may keep some of the lines
            pairs = zip(map(short_digest, keys), map(short_digest, lines), strict=True)
            self._digests[name].update(pairs)
        expected = self._sizes.pop(name, None) if self._watched is not None else None
        try:
            self._sizes[name] = jsonl.append(self.path / name, lines, expected)
        except ConcurrentWriteError as error:
            raise ConcurrentWriteError(
                error.message, hint=f"specbench run --resume {self.path}"
            ) from error

    def prompts(self) -> Iterator[Prompt]:
        """Return all complete prompts, in the order in which they were written.

        Raises:
            UsageError: a line is damaged, or another program changed or added it. Or two prompts
                have the same id and turn, or an earlier turn is missing. Or the run does not have
                the prompt's task, a token id, or that many questions.
        """
        self._check_seal(_PROMPTS, self._prompt_lines)
        return self._checked_prompts()

    def _checked_prompts(self) -> Iterator[Prompt]:
        """Return the prompts.

        Raise the errors of `prompts`, but do not check files of a finished run.
        """
        digests = self._digests[_PROMPTS]
        return (prompt for prompt, _ in self._prompt_lines(digests, complete=self._is_complete))

    def check_prompts(self, planned: Container[tuple[str, int]]) -> None:
        """Raise UsageError if the folder has a prompt that is not planned.

        Args:
            planned: planned prompts, as pairs of prompt id and turn.
        """
        file = self.path / _PROMPTS
        for number, (prompt, _) in enumerate(self._prompt_lines(), 1):
            if (prompt.prompt_id, prompt.turn) not in planned:
                raise UsageError(
                    f"{file}, line {number} is not a valid prompt: the run has no prompt"
                    f" {prompt.prompt_id} with turn {prompt.turn}",
                    hint=repair_hint(file, number),
                )

    def _prompt_lines(
        self, digests: Mapping[str, str] = MappingProxyType({}), *, complete: bool = False
    ) -> Iterator[tuple[Prompt, str]]:
        """Return every prompt with its line in the file. For the arguments, see `check_line`."""
        file, seen = self.path / _PROMPTS, set[tuple[str, int]]()
        tasks = {task["name"]: task for task in self.manifest.get("tasks") or ()}
        question_counts = Counter[str]()
        vocabulary = self._vocabulary()
        for number, line in jsonl.read(file):
            try:
                prompt = _prompt_adapter().validate_json(line)
                name, turn = prompt.prompt_id, prompt.turn
                if (name, turn) in seen:
                    raise ValueError(f"a second prompt {name}, turn {turn}")
                if turn > 1 and (name, turn - 1) not in seen:
                    raise ValueError(f"turn {turn} of {name} without turn {turn - 1}")
                if tasks and prompt.task not in tasks:
                    raise ValueError(f"task {prompt.task!r} is not a task of the run")
                if (largest := max(prompt.ids, default=0)) >= vocabulary:
                    raise ValueError(f"ids: {largest}, but the target has {vocabulary} tokens")
                question_counts[prompt.task] += turn == 1
                max_questions = tasks.get(prompt.task, {}).get("n_questions")
                if max_questions is not None and question_counts[prompt.task] > max_questions:
                    raise ValueError(
                        f"task {prompt.task!r} has {max_questions} questions in the run"
                    )
                check_line((name, turn), line, digests, complete=complete)
            except ValueError as error:
                why = format_first_problem(error) if isinstance(error, ValidationError) else error
                raise UsageError(
                    f"{file}, line {number} is not a valid prompt: {why}",
                    # Do not suggest to delete a line that was changed. Without its prompt, the
                    # records of the prompt would be invalid.
                    hint=f"if that line was added, delete it: sed -i {number}d"
                    f" {shlex.quote(str(file))}; if it was changed, restore it from a copy, or"
                    " begin a new run: specbench run",
                ) from error
            seen.add((name, turn))
            yield prompt, line

    def _vocabulary(self) -> int:
        """Return the target's vocabulary size.

        Return 2^63 if the manifest does not state the size.
        """
        return (self.manifest.get("models", {}).get("target") or {}).get("vocab_size") or 2**63

    @contextlib.contextmanager
    def forbid_changes(self, who: str) -> Iterator[None]:
        """Check that the code in the `with` block does not change the run's files.

        Args:
            who: owner of the code. If a file changed, the manifest stores the owner under
                `spoiled`.

        Raises:
            UsageError: a file changed.
        """
        before = self._stamps()
        try:
            yield
        finally:
            now = self._stamps()
            changed = [name for name in now if now[name] != before[name]]
            if changed:
                self.update(spoiled=who)
                raise self.tampering_error(f"{who} changed {' and '.join(changed)}")

    def tampering_error(self, how: str) -> UsageError:
        """Return the error for a run whose files were changed by code of a method."""
        return UsageError(
            f"{self.path}: {how}, which only the run may write, so its results are not valid",
            hint="start a new run without that plug-in: specbench run",
        )

    def _stamps(self) -> dict[str, tuple[int, ...] | None]:
        """Return inode, size and change time (ctime) of each file. A missing file has None.

        A program cannot set the ctime. So every change of a file changes its ctime.
        """
        found: dict[str, tuple[int, ...] | None] = {}
        for name in (_MANIFEST, _RECORDS, _PROMPTS, RESUME_FILE):
            try:
                stat = (self.path / name).stat()
                found[name] = stat.st_ino, stat.st_size, stat.st_ctime_ns
            except OSError:
                found[name] = None
        return found

    def _write_manifest(self) -> None:
        """Replace the manifest atomically. A reader sees either the old or the new manifest."""
        self.check_lock()
        if self._watched is not None and self.manifest.get("status") != "finished":
            self.manifest["line_digests"] = self._digests
        text = json.dumps(self.manifest, indent=2, allow_nan=False)
        files.replace(self.path / _MANIFEST, f"{text}\n")


def _is_leftover(file: Path) -> bool:
    """Return True if a process created this file at the start of a run and was then killed."""
    if file.name == LOCK:
        return is_lock(file)
    if file.name != RESUME_FILE:
        return _is_temporary(file)
    try:
        return _is_order(files.read_own(file) or b"")
    except (OSError, UsageError):
        return False


def _is_temporary(file: Path) -> bool:
    """Return True if a killed process left this temporary file.

    Temporary files are written before they replace a manifest or the configuration of a run.
    """
    manifest = file.name.startswith(f".{_MANIFEST}.")
    if not (manifest or file.name.startswith(f"{RESUME_FILE}.")) or not files.is_temporary(file):
        return False
    try:
        content = files.read_own(file)
    except (OSError, UsageError):
        return False
    if not content or _HALF_OBJECT.match(content):
        return True
    return _is_manifest(content) if manifest else _is_order(content)


def _is_manifest(content: bytes) -> bool:
    """Return True if the content of a file is the manifest of a run."""
    return "status" in files.json_object(content)


def _is_order(content: bytes) -> bool:
    """Return True if the content of a file is the configuration of a run, as in `RESUME_FILE`."""
    return {"methods", "tasks", "target"} <= files.json_object(content).keys()


@cache
def _prompt_id_adapter() -> TypeAdapter[_RecordPrompt]:
    return TypeAdapter(_RecordPrompt)


def _may_belong_to(line: str, prompts: Container[str]) -> bool:
    """Return True if a line may be a record of one of the prompts. The line is not parsed."""
    try:
        return _prompt_id_adapter().validate_json(line)["prompt_id"] in prompts
    except ValidationError:
        return True  # not a record; reading the whole line raises the error


@cache
def _header_adapter() -> TypeAdapter[_RecordHeader]:
    return TypeAdapter(_RecordHeader)


def _duplicate_error(file: Path, number: int, key: RecordKey) -> UsageError:
    return UsageError(
        f"{file}, line {number}: a second record of {key}", hint=repair_hint(file, number)
    )


def new_path(
    name: str, config: Mapping[str, Any], root: Path = RUNS, now: datetime | None = None
) -> Path:
    """Return a path `<root>/<utc>-<name>-<hash of the config>` that does not exist yet."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "run"
    base = root / f"{stamp}-{slug}-{digest[:8]}"
    path, copy = base, 2
    while path.exists():
        path, copy = base.with_name(f"{base.name}-{copy}"), copy + 1
    return path


def register_run(path: Path, root: Path = RUNS) -> None:
    """Store the path of a run outside `root`, so that `list_runs` finds the run.

    The path is relative to `root`. If the path cannot be stored, `list_runs` does not find the
    run.
    """
    if path.resolve().parent == root.resolve():
        return
    with contextlib.suppress(OSError, ValueError, UsageError):  # another drive, or a link
        place = os.path.relpath(path.resolve(), root.resolve())
        root.mkdir(parents=True, exist_ok=True)
        if is_one_line(place) and place not in _read_other_folders(root):
            fd = files.open_own(root / _OTHER_FOLDERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(fd, "a", encoding="utf-8") as file:
                file.write(f"{place}\n")


def _read_other_folders(root: Path) -> list[str]:
    try:
        return files.read_text(root / _OTHER_FOLDERS, MOST_BYTES).splitlines()
    except (OSError, ValueError):
        return []


def list_runs(root: Path = RUNS) -> list[Path]:
    """Return the folders of all runs that were started in the current folder and still exist.

    Runs in `root` come first, then runs in other folders. Both groups are sorted by name. The runs
    of a matrix (several targets or drafts, one run each) are included.
    """
    usual = {file.parent for name in (_MANIFEST, matrix.MATRIX) for file in root.glob(f"*/{name}")}
    others = {Path(os.path.normpath(root / place)) for place in _read_other_folders(root) if place}
    found = (run for place in (*sorted(usual), *sorted(others)) for run in _runs_in(place))
    return [*dict.fromkeys(run for run in found if RunDir.holds_run(run))]


def _runs_in(place: Path) -> list[Path]:
    return matrix.run_folders(place) if matrix.is_matrix(place) else [place]


def find_run(name: str, *, to_resume: bool = False) -> Path:
    """Return the folder that the argument RUN of a command names.

    Args:
        name: `last`, a folder, or the name of a folder in `RUNS`.
        to_resume: return an unfinished run if there is one, see `find_latest`.

    Raises:
        UsageError: the name is `last`, and there is no run.
    """
    if name == "last":
        return find_latest(to_resume=to_resume)
    path, in_runs = Path(name), RUNS / name
    return in_runs if not _holds_runs(path) and _holds_runs(in_runs) else path


def _holds_runs(path: Path) -> bool:
    return RunDir.holds_run(path) or matrix.is_matrix(path)


def find_latest(root: Path = RUNS, *, to_resume: bool = False) -> Path:
    """Return the run that `last` means on the command line.

    This is the finished run whose manifest was written last. If this run belongs to a matrix,
    return the folder of the matrix.

    Args:
        to_resume: return the newest unfinished run instead. If all runs are finished, return the
            newest run.

    Raises:
        UsageError: there is no run, or no run has finished.
    """
    runs = sorted(
        list_runs(root), key=lambda path: (path / _MANIFEST).stat().st_mtime_ns, reverse=True
    )
    if not runs:
        raise UsageError(f"there is no run in {root}", hint="specbench run")
    found = next((path for path in runs if _is_finished(path) is not to_resume), None)
    if found is None and not to_resume:
        raise UsageError(
            f"no run in {root} has finished; the newest is {runs[0].name}",
            hint=f"specbench run --resume last, or specbench report {runs[0]}",
        )
    found = found or runs[0]
    return found.parent if matrix.is_matrix(found.parent) else found


def _is_finished(path: Path) -> bool:
    """Return True if a run has finished.

    If its manifest cannot be read, the run counts as unfinished.
    """
    try:
        return RunDir.open(path).manifest.get("status") == "finished"
    except SpecbenchError:
        return False
