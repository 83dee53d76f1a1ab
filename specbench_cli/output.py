"""The one sink of the command line: data goes to stdout, talk goes to stderr.

A person at a terminal gets tables and colours; a pipe gets lists as tab-separated lines, so that
`cut`, `awk` and pandas read what they are given, and the result of a run as it is asked for
(`Format`). NO_COLOR takes colours away, FORCE_COLOR makes a pipe
look like a terminal, for CI logs. The user's own text is never read as markup, and control
characters are shown instead of being sent to the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from typing import IO, Any, Literal, TextIO, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

Format = Literal["table", "tsv", "json"]
"""How a result is written: to be read, as tab-separated lines, or as a JSON object a line."""

_LOG_WIDTH = 100
"""Columns of a drawn table where no terminal says how many there are."""
_GAP = 2
"""Blanks between the columns of a table that is drawn."""

_DIGITS = 6
"""Significant digits of a figure in tab-separated lines; files and JSON have all."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DIRECTION = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Overrides of the writing direction, which make a text look like another."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line decide what a closed pipe means; rich would exit with 1."""
        raise BrokenPipeError


class _Talk:
    """stderr, whose reader may go: a terminal that is closed, a pipe, a log on a full disk. What
    nobody can read then is lost, and the work goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """All of the text, or nothing."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept for a reader who is gone."""
        try:
            self._file.flush()
        except OSError:
            _drop(self._file)


def human() -> bool:
    """Whether stdout is read by a person: a terminal, or FORCE_COLOR is set."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def columns() -> int | None:
    """How wide the terminal is that stdout is; None where it is none, and lines may be long."""
    return console(stderr=False).width if sys.stdout.isatty() else None


def wrapped(text: str, width: int, first: str = "", rest: str = "  ") -> list[str]:
    """A text in lines of a width, broken between words alone.

    Args:
        first, rest: what the first line and the others begin with.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def console(*, stderr: bool) -> Console:
    """A console on today's stdout or stderr, with markup, emoji and highlighting off. Talk to a
    terminal is broken between words."""
    return _Console(
        file=cast(IO[str], _Talk(sys.stderr)) if stderr else None,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not (stderr and sys.stderr.isatty()),
    )


def plain(value: object) -> str:
    """Text for a terminal: control characters but tab and newline are spelled out, and so is what
    turns the writing direction round."""
    text = "" if value is None else str(value)
    return directed(_CONTROL.sub(lambda found: repr(found[0])[1:-1], text))


def directed(text: str, lead: str = "\\") -> str:
    """A text whose overrides of the writing direction are spelled out: for files, too.

    Args:
        lead: what a backslash is written as there.
    """
    return _DIRECTION.sub(lambda found: f"{lead}u{ord(found[0]):04x}", text)


def data(content: RenderableType) -> None:
    """Print a result: a text, or anything that rich can draw."""
    if isinstance(content, str):
        sys.stdout.write(f"{plain(content)}\n")
    else:
        console(stderr=False).print(content)


def rows(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records: as a `table` for a person, tab-separated for a pipe; `columns` as there."""
    (table if human() else tsv)(records, columns)


def table(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records as a drawn table, wherever stdout goes.

    On a terminal that is too narrow for the longest words of all columns they stand in several
    tables one below the other, each with the first column.

    Args:
        records: one mapping a row; a missing or None value is an empty cell.
        columns: which keys, in which order; default: the keys of all records, as first seen.
    """
    names, cells = _cells(records, columns)
    page = console(stderr=False)
    if not human():
        page.width = _LOG_WIDTH
    texts = [[line[at] for line in [[*map(plain, names)], *cells]] for at in range(len(names))]
    words = [max(len(word) for text in column for word in text.split() or [""]) for column in texts]
    parts = [[0]] if names else []
    for at in range(1, len(names)):
        if (
            len(parts[-1]) > 1
            and sum(words[i] + _GAP for i in [*parts[-1], at]) > page.width + _GAP
        ):
            parts.append([0])
        parts[-1].append(at)
    for part in parts:
        drawn = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for at in part:
            single = max(map(len, texts[at])) == words[at]
            drawn.add_column(
                Text(texts[at][0]), overflow="fold", no_wrap=single, min_width=words[at]
            )
        for line in cells:
            drawn.add_row(*(Text(line[at]) for at in part))
        page.print(drawn, soft_wrap=False)


def tsv(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records as tab-separated lines, wherever stdout goes; of `columns` see `table`."""
    names, cells = _cells(records, columns)
    lines = ("\t".join(" ".join(cell.split()) for cell in line) for line in [names, *cells])
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _cells(
    records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None
) -> tuple[list[str], list[list[str]]]:
    """The headings of a table, and its cells."""
    lines = list(records)
    names = list(columns or dict.fromkeys(key for line in lines for key in line))
    return names, [[_cell(line.get(name)) for name in names] for line in lines]


def facts(pairs: Mapping[str, Any]) -> None:
    """Print named facts, one a line: `name  value` for a person, `name<TAB>value` for a pipe."""
    width = max(map(len, pairs), default=0) + 2 if human() else 0
    for name, value in pairs.items():
        gap = " " * (width - len(name)) if human() else "\t"
        data(f"{name}{gap}{_cell(value)}")


def json_line(record: object) -> None:
    """Print one JSON line on stdout and flush it; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something on stderr."""
    console(stderr=True).print(plain(text))


def error(message: str, hint: str | None = None) -> None:
    """Say what went wrong on stderr, and what to do about it."""
    talk = console(stderr=True)
    talk.print(Text.assemble(("error: ", "bold red"), plain(message)))
    if hint:
        talk.print(Text.assemble(("hint: ", "bold cyan"), plain(hint)))


def drop_stdout() -> None:
    """Let what is written to stdout go nowhere: nobody reads it."""
    _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _cell(value: object) -> str:
    """One value of a table: lists and mappings become texts with commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(key)} {_cell(member)}" for key, member in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        members = sorted(value) if isinstance(value, (set, frozenset)) else value
        return ", ".join(_cell(member) for member in members)
    if isinstance(value, float):
        return f"{value:.{4 if human() else _DIGITS}g}"
    return plain(value)


def _jsonable(value: Any) -> Any:
    """`value` in JSON's own types."""
    if isinstance(value, Enum):
        return _jsonable(value.value)
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(member) for key, member in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable(dataclasses.asdict(value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(_jsonable, value))
    if isinstance(value, Iterable):
        return [_jsonable(member) for member in value]
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
