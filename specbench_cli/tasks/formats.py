"""A file's bytes to rows: JSON lines, JSON, CSV, TSV or parquet, by the ending of its name."""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any


class Unreadable(Exception):
    """A file is not what its name says.

    Attributes:
        place: the line or row where reading stopped; None for the file as a whole.
    """

    def __init__(self, why: str, place: int | None = None) -> None:
        super().__init__(why)
        self.place = place


def read_rows(data: bytes, name: str, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Rows, each with its place: the line for texts, the number from 1 for others.

    Args:
        name: the file's name; its ending says what it holds.
        columns: names of the columns of a CSV or TSV file that has no heading.

    Raises:
        Unreadable: it holds something else, or ends too early.
    """
    match PurePosixPath(name).suffix:
        case ".jsonl":
            return _json_lines(data)
        case ".json":
            return _json(data)
        case ".parquet":
            return _parquet(data)
        case suffix:
            return _table(data, suffix, columns)


def member(data: bytes, name: str) -> bytes:
    """A file inside a zip archive. Raises Unreadable: damaged, or not in it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read(name)
    except KeyError as fault:
        raise Unreadable(f"it holds no {name}") from fault
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as fault:
        raise Unreadable(f"not a whole zip archive: {fault}") from fault


def _json_lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Lines that are not blank. Only \\n ends a line, since texts may hold U+2028."""
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            yield line, _decoded(raw, line)


def _json(data: bytes) -> Iterator[tuple[int, Any]]:
    rows = _decoded(data, None)
    if not isinstance(rows, list):
        raise Unreadable(f"not a JSON list of rows but a {type(rows).__name__}")
    yield from enumerate(rows, start=1)


def _decoded(raw: bytes, line: int | None) -> Any:
    try:
        # Of bytes json would guess the encoding, and read half a character.
        found = json.loads(raw.decode("utf-8-sig"))
        if b"\\ud" in raw.lower():  # half a character can be written so, and nothing can write it
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as fault:
        raise Unreadable(f"not JSON: {fault}", line) from fault


def _parquet(data: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError, ValueError) as fault:
        raise Unreadable(f"not a whole parquet file: {str(fault).partition(chr(10))[0]}") from fault
    yield from enumerate(table.to_pylist(), start=1)


def _table(data: bytes, suffix: str, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """CSV as spreadsheets write it; in TSV a tab is a tab, and quotes mean nothing."""
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as fault:
        raise Unreadable(f"not UTF-8: {fault}") from fault
    kind: dict[str, Any] = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {"strict": True}
    )
    reader = csv.reader(text, **kind)
    heading = list(columns)
    try:
        for cells in reader:
            if not cells:
                continue
            if not heading:
                heading = cells
                continue
            if len(cells) != len(heading):
                why = f"{len(cells)} columns instead of {len(heading)} ({', '.join(heading)})"
                raise Unreadable(why, reader.line_num)
            yield reader.line_num, dict(zip(heading, cells, strict=True))
    except csv.Error as fault:
        raise Unreadable(f"not {suffix[1:].upper()}: {fault}", reader.line_num) from fault
