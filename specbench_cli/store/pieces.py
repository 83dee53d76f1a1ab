"""Records, read a line at a time; those of a large file by several processes, a piece each.

A piece ends with a line. Who reads one says what it makes of each record; what cannot be read is
read again by the process that asked, which then raises what is wrong with it.
"""

from __future__ import annotations

import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar, cast

from specbench_cli.errors import UsageError
from specbench_cli.interpreter import python_command, usable_cpus
from specbench_cli.store import jsonl
from specbench_cli.store.digests import short_digest
from specbench_cli.store.invariants import RunFacts, SharedFacts, shared_facts, validate
from specbench_cli.store.schema import Record, RecordKey, from_json

T = TypeVar("T")

MIN_PARALLEL_BYTES = 1 << 27
"""Bytes of a file from which starting processes is worth it: half a minute's reading is a run of a
gigabyte."""
_PIECE_BYTES = 1 << 22
_MAX_PROCESSES = 8
"""Processes: one alone takes what they make."""
ByteRange = tuple[int, int]
"""Bytes of a file: the first one, and the one behind the last."""


class ParsedLine(NamedTuple, Generic[T]):
    """What was made of the record of a line, and what other records must agree with."""

    line: int
    key: RecordKey
    facts: SharedFacts
    value: T


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Parser and checks that turn the lines of a file into valid records of its run.

    digests: digest of each line, by the digest of its key. complete: True if the run wrote no
    other lines.
    """

    file: Path
    known: RunFacts
    vocabulary: int
    digests: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    def record(self, number: int, line: str) -> Record:
        """The record of a line. Raises UsageError: it is none; names the line."""
        try:
            record = from_json(line)
            validate(record, self.vocabulary)
            self.known.check(record)
            check_line(record.key, line, self.digests, complete=self.complete)
        except ValueError as error:
            raise invalid_record_error(self.file, number, error) from error
        return record

    def read(
        self, make: Callable[[Record], T], span: ByteRange = (0, sys.maxsize), first: int = 1
    ) -> Iterator[ParsedLine[T]]:
        """What is made of the records of a span, whose first line has the number `first`."""
        for number, line in jsonl.read(self.file, *span, first):
            record = self.record(number, line)
            yield ParsedLine(number, record.key, shared_facts(record), make(record))


def check_line(key: object, line: str, digests: Mapping[str, str], *, complete: bool) -> None:
    """Raise ValueError if another program changed or added a line.

    Args:
        key: Key of the record or prompt in the line.
        digests: Digest of each line, by the digest of its key.
        complete: True if the run wrote no lines except those with a digest.
    """
    expected = digests.get(short_digest(key))
    if expected is None and complete:
        raise ValueError(f"another program added it: {key}")
    if expected is not None and expected != short_digest(line):
        raise ValueError(f"another program changed it: {key}")


def invalid_record_error(file: Path, number: int, why: object) -> UsageError:
    """What is said of a line that is no record."""
    return UsageError(f"{file}, line {number} is no record: {why}", hint=repair_hint(file, number))


def repair_hint(file: Path, number: int) -> str:
    """What to do about a damaged line: what it held can be made again."""
    from specbench_cli.store.manifest import ORDER

    delete = f"delete that line: sed -i {number}d {shlex.quote(str(file))}"
    if not (file.parent / ORDER).exists():
        return f"{delete}; or begin a new run: specbench run"
    resume = f"specbench run --resume {shlex.quote(str(file.parent))}"
    return f"{delete}; {resume} then measures what is missing"


def read_records(reader: RecordReader, make: Callable[[Record], T]) -> Iterator[ParsedLine[T]]:
    """What a function makes of every record, in the order of the file.

    Args:
        make: a function of a module, for other processes call it.

    Raises:
        UsageError: as `Reader.record`.
    """
    jsonl.check_file(reader.file)
    spans, processes = _split_file(reader.file), min(_MAX_PROCESSES, usable_cpus())
    if processes < 2 or not spans or spans[-1][1] < MIN_PARALLEL_BYTES:
        yield from reader.read(make)
        return
    before = 0
    with ExitStack() as stack:
        helpers = [
            stack.enter_context(_ReaderProcess(reader, make, spans[place::processes]))
            for place in range(processes)
        ]
        for place, span in enumerate(spans):
            piece = helpers[place % processes].read_piece()
            found = (
                reader.read(make, span, before + 1) if piece is None else _renumber(before, piece)
            )
            for each in found:
                yield each
                before = each.line


def _renumber(line: int, piece: Iterable[ParsedLine[T]]) -> Iterator[ParsedLine[T]]:
    """A piece that was read alone, its lines numbered from those before it."""
    return (ParsedLine(line + number, key, own, made) for number, key, own, made in piece)


class _ReaderProcess:
    """A process that reads some pieces, one behind the other."""

    def __init__(
        self, reader: RecordReader, make: Callable[[Record], Any], spans: list[ByteRange]
    ) -> None:
        # The process that asked answers Ctrl-C, and ends this one.
        command = python_command(f"{__name__}:child", ignores_interrupts=True)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        self._replies = cast(IO[bytes], self._process.stdout)
        with suppress(BrokenPipeError), cast(IO[bytes], self._process.stdin) as pipe_in:
            pickle.dump((reader, make, spans), pipe_in)

    def __enter__(self) -> _ReaderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._replies.close()
        self._process.kill()
        self._process.wait()

    def read_piece(self) -> list[ParsedLine[Any]] | None:
        """The next piece; None where it could not be read, or the process died."""
        try:
            found: list[ParsedLine[Any]] | None = pickle.load(self._replies)  # noqa: S301 (our own process sends it)
        except (EOFError, pickle.UnpicklingError):
            return None
        return found


def child() -> None:
    """What such a process does."""
    reader, make, spans = pickle.load(sys.stdin.buffer)  # noqa: S301 (so does this one)
    with jsonl.pause_garbage_collection(), suppress(BrokenPipeError):
        for span in spans:
            try:
                found = list(reader.read(make, span))
            except UsageError:
                found = None
            pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()


def _split_file(file: Path) -> list[ByteRange]:
    """The pieces of a file; none where there is no file."""
    if not file.exists():
        return []
    ends, size = [0], file.stat().st_size
    with file.open("rb") as lines:
        while ends[-1] < size:
            lines.seek(min(ends[-1] + _PIECE_BYTES, size))
            lines.readline()
            ends.append(min(lines.tell(), size))
    return list(pairwise(ends))
