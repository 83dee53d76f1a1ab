"""Conversion of file bytes to rows by file extension: JSON Lines, JSON, CSV, TSV, Parquet, text."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import IO, Any

EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""File extensions that rows can be read from, in any case."""
GZIP_EXTENSION = ".gz"
"""Extension of a compressed file, after one of `EXTENSIONS`."""

PROMPT = "prompt"
"""Column of a text that has no column name."""


class UnreadableFile(Exception):
    """Error for a file whose content does not have the format of its extension.

    Attributes:
        place: Line or row number of the error. None if the error concerns the whole file.
    """

    def __init__(self, why: str, place: int | None = None) -> None:
        super().__init__(why)
        self.place = place


def get_extension(name: str) -> str:
    """Return the file extension in lower case, without `.gz`."""
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix == GZIP_EXTENSION else path.suffix


def get_stem(name: str) -> str:
    """Return the file name without its extension and `.gz`."""
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).stem if path.suffix.lower() == GZIP_EXTENSION else path.stem


def read_rows(data: bytes, name: str, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Return an iterator over the rows of a file.

    Each item is (place, row). The place is the line number or the row number, counted from 1.

    Args:
        data: content of the file.
        name: file name, whose extension determines the format.
        columns: column names of a CSV or TSV file without a header.

    Raises:
        UnreadableFile: the content does not have the format of the extension, or is truncated.
    """
    match get_extension(name):
        case ".jsonl" | ".ndjson":
            return _read_json_lines(data)
        case ".json":
            return _read_json(data)
        case ".parquet":
            return _read_parquet(data)
        case ".txt":
            return _read_lines(data)
        case suffix:
            return _read_table(data, suffix, columns)


MAX_BYTES = 4 << 30
"""Maximum decompressed size in bytes. Some files expand to a thousand times their size."""


def read_limited(file: IO[bytes] | gzip.GzipFile) -> bytes:
    """Return the decompressed content of a file. Raise OSError if it is larger than `MAX_BYTES`."""
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"it has more than {MAX_BYTES >> 20:,} MiB")
    return data


def read_zip_member(data: bytes, name: str) -> bytes:
    """Return the content of a file in a zip archive. Raise UnreadableFile if it fails."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(name) as file:
            return read_limited(file)
    except KeyError as fault:
        raise UnreadableFile(f"it holds no {name}") from fault
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as fault:
        raise UnreadableFile(f"not a whole zip archive: {fault}") from fault


def _read_json_lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the row of each line that is not blank.

    Only \\n ends a line, because texts may contain other line separators such as U+2028.
    """
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            yield line, _parse_json(raw, line)


def _read_json(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a JSON file.

    The rows are the items of a top-level list. If the file contains an object with exactly one
    list,
    they are the items of that list; otherwise the object is the only row. A string in a list is a
    prompt. JSON Lines are accepted too, because many .json files contain them.
    """
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) > 1 and all(line.strip().startswith(b"{") for line in lines):
        yield from _read_json_lines(data)
        return
    rows = _parse_json(data, None)
    if isinstance(rows, dict):
        rows = _find_rows(rows)
    if not isinstance(rows, list):
        raise UnreadableFile(f"not a JSON list of rows but a {type(rows).__name__}")
    for place, row in enumerate(rows, start=1):
        yield place, {PROMPT: row} if isinstance(row, str) else row


def _find_rows(found: dict[str, Any]) -> Any:
    """Return the rows in a JSON object, or the object itself if it contains no list of rows."""
    columns = [name for name in (PROMPT, "question") if isinstance(found.get(name), list | dict)]
    if columns:
        raise UnreadableFile(
            f"not a JSON list of rows but an object of columns, such as {columns[0]}"
        )
    if found.keys() & {PROMPT, "question", "turns", "messages", "body"}:
        return [found]
    lists = [value for value in found.values() if _is_rows(value)]
    return lists[0] if len(lists) == 1 else found


def _is_rows(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and (all(isinstance(row, dict) for row in value) or all(isinstance(r, str) for r in value))
    )


def _read_lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield each line of a text file that is not blank. Each line is a prompt."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UnreadableFile(f"not UTF-8: {fault}") from fault
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, {PROMPT: line.strip()}


def _parse_json(raw: bytes, line: int | None) -> Any:
    try:
        # Decode explicitly, because json.loads would guess the encoding of bytes.
        found = json.loads(raw.decode("utf-8-sig"))
        if b"\\ud" in raw.lower():  # reject lone surrogates, which cannot be encoded
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as fault:
        raise UnreadableFile(f"not JSON: {fault}", line) from fault


def _read_parquet(data: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError, ValueError) as fault:
        raise UnreadableFile(
            f"not a whole parquet file: {str(fault).partition(chr(10))[0]}"
        ) from fault
    yield from enumerate(table.to_pylist(), start=1)


def _find_delimiter(text: io.StringIO) -> str:
    """Return the delimiter of a CSV file: a semicolon if the header has semicolons and no comma.

    In countries with a decimal comma, spreadsheets write semicolons between columns.
    """
    heading = text.readline()
    text.seek(0)
    return ";" if ";" in heading and "," not in heading else ","


def _read_table(data: bytes, suffix: str, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a CSV or TSV file.

    A CSV file has quotes as spreadsheets write them. A TSV file has no quotes.
    """
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as fault:
        raise UnreadableFile(f"not UTF-8: {fault}") from fault
    # Python's csv module limits a cell to 131,072 characters, in the whole process. Prompts may be
    # longer.
    csv.field_size_limit(max(csv.field_size_limit(), len(data)))
    kind: dict[str, Any] = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        if suffix == ".tsv"
        else {"strict": True, "delimiter": _find_delimiter(text)}
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
                raise UnreadableFile(why, reader.line_num)
            yield reader.line_num, dict(zip(heading, cells, strict=True))
    except csv.Error as fault:
        raise UnreadableFile(f"not {suffix[1:].upper()}: {fault}", reader.line_num) from fault
