"""Reader of records. It divides a large file into pieces, which several processes read in parallel.

A piece ends at the end of a line. A child process sends one result per record to the parent
process. If the child process cannot read a piece, the parent process reads this piece again and
raises the error.
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
"""Minimum size of a file, in bytes, to read it with several processes. Reading a gigabyte in one
process takes half a minute."""
_PIECE_BYTES = 1 << 22
_MAX_PROCESSES = 8
"""Maximum number of processes. A single process collects their results, which limits the gain."""
ByteRange = tuple[int, int]
"""Range of bytes in a file: the first, and the one after the last."""


class ParsedLine(NamedTuple, Generic[T]):
    """Result of calling a function with the record in a line of a file.

    line: number of the line.
    key: key of the record.
    facts: facts in the record with which other records must agree.
    value: result of the function.
    """

    line: int
    key: RecordKey
    facts: SharedFacts
    value: T


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Parser of the lines of a file with records.

    It checks that each line is a valid record of the run.

    known: facts about the run with which each record must agree.
    vocabulary: vocabulary size of the target.
    digests: digest of a record's key -> digest of the record's line.
    complete: True if `digests` has all lines that the run wrote.
    """

    file: Path
    known: RunFacts
    vocabulary: int
    digests: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    def record(self, number: int, line: str) -> Record:
        """Return the record in a line. If it is invalid, raise UsageError with the line number."""
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
        """Yield the result of the function `make` for each record in a byte range of the file.

        Args:
            first: line number of the first line in the range.
        """
        for number, line in jsonl.read(self.file, *span, first):
            record = self.record(number, line)
            yield ParsedLine(number, record.key, shared_facts(record), make(record))


def check_line(key: object, line: str, digests: Mapping[str, str], *, complete: bool) -> None:
    """Raise ValueError if another program changed or added a line.

    Args:
        key: Key of the record or prompt in the line.
        digests: digest of a key -> digest of the line with this key.
        complete: True if the run wrote no other lines than those with a digest.
    """
    expected = digests.get(short_digest(key))
    if expected is None and complete:
        raise ValueError(f"another program added it: {key}")
    if expected is not None and expected != short_digest(line):
        raise ValueError(f"another program changed it: {key}")


def invalid_record_error(file: Path, number: int, why: object) -> UsageError:
    """Return the error for a line that is not a valid record."""
    hint = repair_hint(file, number)
    return UsageError(f"{file}, line {number} is not a valid record: {why}", hint=hint)


def repair_hint(file: Path, number: int) -> str:
    """Return a hint to delete a damaged line, and to measure its output again."""
    from specbench_cli.store.manifest import RESUME_FILE

    delete = f"delete that line: sed -i {number}d {shlex.quote(str(file))}"
    if not (file.parent / RESUME_FILE).exists():
        return f"{delete}; or begin a new run: specbench run"
    resume = f"specbench run --resume {shlex.quote(str(file.parent))}"
    return f"{delete}; {resume} then measures what is missing"


def read_records(reader: RecordReader, make: Callable[[Record], T]) -> Iterator[ParsedLine[T]]:
    """Yield the result of a function for every record, in the order of the file.

    Args:
        reader: parser of the file.
        make: the function. It must be at the top level of a module, because other processes import
            and call it.

    Raises:
        UsageError: a line is not a valid record of the run, see `RecordReader.record`.
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
    """Return the parsed lines of a piece with line numbers of the whole file.

    Args:
        line: number of lines before the piece.
        piece: parsed lines, numbered from the start of the piece.
    """
    return (ParsedLine(line + number, key, own, made) for number, key, own, made in piece)


class _ReaderProcess:
    """Child process that reads some pieces of a file, one after another."""

    def __init__(
        self, reader: RecordReader, make: Callable[[Record], Any], spans: list[ByteRange]
    ) -> None:
        # The child process ignores Ctrl-C. The parent process handles Ctrl-C and ends the child
        # process.
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
        """Return the parsed lines of the next piece.

        Return None if the child process could not read the piece, or has ended.
        """
        try:
            found: list[ParsedLine[Any]] | None = pickle.load(self._replies)  # noqa: S301 (our own process sends it)
        except (EOFError, pickle.UnpicklingError):
            return None
        return found


def child() -> None:
    """Run a child process: read pieces of a file, and send the results to the parent process."""
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
    """Return the byte range of each piece of a file. Return an empty list if there is no file."""
    if not file.exists():
        return []
    ends, size = [0], file.stat().st_size
    with file.open("rb") as lines:
        while ends[-1] < size:
            lines.seek(min(ends[-1] + _PIECE_BYTES, size))
            lines.readline()
            ends.append(min(lines.tell(), size))
    return list(pairwise(ends))
