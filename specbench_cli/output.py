"""Output of the command line: results go to stdout, messages go to stderr.

On a terminal, results are tables with colours. In a pipe, lists are tab-separated lines for `cut`,
`awk` and pandas, and the result of a run has the format that the user chose. NO_COLOR disables
colours. With FORCE_COLOR, a pipe gets the same output as a terminal, for CI logs. The text of
messages is never parsed as rich markup. Control characters and invisible characters are always
escaped.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from typing import IO, Any, Literal, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from specbench_cli.errors import HIDDEN
from specbench_cli.errors import escape_hidden as escape_hidden

Format = Literal["table", "tsv", "json"]
"""Output format: a table for people, tab-separated lines, or one JSON object per line."""

_LOG_WIDTH = 100
"""Width of a table in columns if stdout is not a terminal."""
_GAP = 2
"""Number of spaces between the columns of a table."""

_DIGITS = 6
"""Number of significant digits in tab-separated lines. Files and JSON have all digits."""

_WORKFLOW_COMMAND = re.compile(r"^(\s*):(?=:)|##(?=\[)", re.MULTILINE)
"""Start of a line that GitHub Actions interprets as a workflow command."""
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
"""Characters with which a formula in a spreadsheet begins, also in full-width form."""
_SPLITS = ("\t", "\r", "\n")
_SPLIT_OFF = re.compile(rf"[;\t\r\n]\s*(?=[{re.escape(''.join(_FORMULA))}])")
_FIGURES = re.compile(r"[-+\d.,%\[\] ]*(?:e[-+]\d+|x)?")
"""Numbers as they appear in tables. With a leading sign they are still not formulas."""
_HIDDEN_IN_JSON = re.compile(f"{HIDDEN.pattern}|#(?=#\\[)")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which the command line handles. The default of rich exits with
        code 1.
        """
        raise BrokenPipeError

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Escape hidden characters in all text, but not in the control codes that rich adds for
        colours.
        """
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escape_for_log(segment.text), segment.style)


class _BestEffortStream:
    """Wrapper of stderr that ignores write errors.

    Writing fails if the terminal or pipe is closed or the disk is full. The run then continues.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it on an error."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop its content on an error."""
        try:
            self._file.flush()
        except OSError:
            _drop(self._file)


class NamedStream:
    """Wrapper of a standard stream that adds the stream's name to its OSErrors.

    Args:
        stream: the stream to write to.
        name: name of the stream in errors.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        with self._name_in_errors():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write a sequence of texts."""
        with self._name_in_errors():
            self._stream.writelines(lines)

    def flush(self) -> None:
        """Flush the buffer."""
        with self._name_in_errors():
            self._stream.flush()

    @contextmanager
    def _name_in_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as fault:
            if fault.errno != errno.EIO:  # EIO means that the terminal was closed
                fault.filename = self._name
            raise


def is_interactive() -> bool:
    """Return True if stdout is a terminal, or FORCE_COLOR is set."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def columns() -> int | None:
    """Return the width of the terminal, or None if stdout is not a terminal."""
    return console(stderr=False).width if sys.stdout.isatty() else None


def wrap(text: str, width: int, first: str = "", rest: str = "  ") -> list[str]:
    """Return the lines of a text wrapped at a width. Words are not broken.

    Args:
        first: Prefix of the first line.
        rest: Prefix of the other lines.
    """
    return textwrap.wrap(
        escape_hidden(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def console(*, stderr: bool) -> Console:
    """Return a console for the current stdout or stderr, without markup, emoji and highlighting.

    Messages to a terminal are wrapped between words.
    """
    return _Console(
        file=cast(IO[str], _BestEffortStream(sys.stderr)) if stderr else None,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not (stderr and sys.stderr.isatty()),
    )


def make_text(value: object, style: str = "") -> Text:
    """Return text for rich with hidden characters escaped, so that its width is correct."""
    return Text(escape_hidden(value), style)


def escape_formula(value: object) -> object:
    """Return a value that a spreadsheet does not evaluate as a formula.

    A text that begins like a formula gets an apostrophe in front. So does text after a semicolon,
    tab
    or line break, because some spreadsheets split cells there. Numbers do not change.
    """
    if not isinstance(value, str):
        return value
    text = value.lstrip()
    blank = value[: len(value) - len(text)]
    lead = "'" if text.startswith(_FORMULA) or blank.startswith(_SPLITS) else ""
    return escape_hidden(lead + _SPLIT_OFF.sub(r"\g<0>'", value))


def escape_json(document: str) -> str:
    """Return an equivalent JSON document with hidden characters written as JSON escapes."""
    return _HIDDEN_IN_JSON.sub(lambda found: _units(found[0]), document)


def _units(text: str) -> str:
    """Return a text as JSON escapes, one per UTF-16 code unit."""
    units = text.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def escape_for_log(text: str) -> str:
    """Return text for a log. Hidden characters are escaped.

    In GitHub Actions, workflow commands in the text are escaped too, so that they are not executed.
    """
    shown = escape_hidden(text)
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return shown
    return _WORKFLOW_COMMAND.sub(lambda found: f"{found[0][:-1]}\\x{ord(found[0][-1]):02x}", shown)


def data(content: RenderableType) -> None:
    """Print a result on stdout: a text or an object of rich."""
    if isinstance(content, str):
        sys.stdout.write(f"{escape_for_log(content)}\n")
    else:
        console(stderr=False).print(content)


def rows(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records as a table on a terminal, otherwise as tab-separated lines.

    Args:
        columns: Keys to show, in this order. Default: all keys.
    """
    (table if is_interactive() else tsv)(records, columns)


def table(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records as a table, also if stdout is not a terminal.

    If the terminal is too narrow, the columns are split into several tables, which all begin with
    the first column.

    Args:
        records: One mapping per row. A missing or None value leaves the entry empty.
        columns: Keys to show, in this order. Default: all keys, in the order of their first use.
    """
    names, cells = _cells(records, columns)
    page = console(stderr=False)
    if not is_interactive():
        page.width = _LOG_WIDTH
    texts = [
        [line[at] for line in [[*map(escape_hidden, names)], *cells]] for at in range(len(names))
    ]
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
                make_text(texts[at][0]), overflow="fold", no_wrap=single, min_width=words[at]
            )
        for line in cells:
            drawn.add_row(*(make_text(line[at]) for at in part))
        page.print(drawn, soft_wrap=False)


def tsv(records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print records as tab-separated lines.

    Args:
        columns: Keys to print, in this order. Default: all keys.
    """
    names, cells = _cells(records, columns)
    lines = ("\t".join(map(_field, line)) for line in [names, *cells])
    sys.stdout.writelines(f"{escape_for_log(line)}\n" for line in lines)


def _field(cell: str) -> str:
    """Return the text of a table cell as a field of a tab-separated line. Spreadsheets can open
    it safely.
    """
    text = " ".join(cell.split())
    return text if _FIGURES.fullmatch(text) else str(escape_formula(text))


def _cells(
    records: Iterable[Mapping[str, Any]], columns: Sequence[str] | None
) -> tuple[list[str], list[list[str]]]:
    """Return the column headings and the cells of a table as text."""
    lines = list(records)
    names = list(columns or dict.fromkeys(key for line in lines for key in line))
    return names, [[_cell(line.get(name)) for name in names] for line in lines]


def facts(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one per line. In a pipe, a tab separates name and value."""
    width = max(map(len, pairs), default=0) + 2 if is_interactive() else 0
    for name, value in pairs.items():
        gap = " " * (width - len(name)) if is_interactive() else "\t"
        data(f"{name}{gap}{_cell(value)}")


def json_line(record: object) -> None:
    """Print one JSON line on stdout and flush it. NaN and infinity become null."""
    line = json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False)
    sys.stdout.write(escape_json(line) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a message on stderr."""
    console(stderr=True).print(make_text(text))


def error(message: str, hint: str | None = None) -> None:
    """Print an error on stderr, and a hint how to fix it."""
    talk = console(stderr=True)
    talk.print(Text("error: ", "bold red").append_text(make_text(message)))
    if hint:
        talk.print(Text("hint: ", "bold cyan").append_text(make_text(hint)))


def open_closed_streams() -> None:
    """Redirect standard streams that the shell closed (`>&-`, `2>&-`) to `os.devnull`.

    Python sets a closed stream to None. Without a redirection, the next opened file would get the
    stream's file descriptor, and output would go into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def drop_stdout() -> None:
    """Discard all further output to stdout. Call this after the reader of a pipe has closed it."""
    _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # the stream has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _cell(value: object) -> str:
    """Return the text of a table cell. The members of lists and mappings are separated by
    commas.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{escape_hidden(key)} {_cell(member)}" for key, member in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        members = sorted(value) if isinstance(value, (set, frozenset)) else value
        return ", ".join(_cell(member) for member in members)
    if isinstance(value, float):
        return f"{value:.{4 if is_interactive() else _DIGITS}g}"
    return escape_hidden(value)


def _jsonable(value: Any) -> Any:
    """Convert a value to the types that JSON has."""
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
