"""Exceptions with messages for the user, and their exit codes.

A message names the wrong value and the allowed values. Its hint is usually a command to type. Any
other exception is reported as a bug in specbench (exit code 4).
"""

import errno
import io
import os
import re
import traceback
from enum import IntEnum
from pathlib import Path

MAX_TEXT_LENGTH = 2000
"""Maximum number of characters of an untrusted text in messages, e.g. of a server's reply."""
_MARGIN = 500
"""Number of characters by which a text may exceed the limit without being cut. So a text that was
already cut, and then got a prefix, is not cut again."""

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and newline: ESC, CR, DEL, the C1 set
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the writing direction
    "\u2028\u2029"  # line and paragraph separators
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\u206a-\u206f\u3164"
    "\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # Default_Ignorable_Code_Point and categories Cf
    "\u2800\U00016fe4\U0001d159"  # blanks that Unicode counts among symbols and marks
    "\ud800-\udfff"  # lone surrogates, which UTF-8 cannot encode
    "]"
)
"""Control characters, characters that change the writing direction, and invisible characters.
U+200C, U+200D and U+FE0F are not included, because Persian, Hindi and emoji need them."""


def escape_hidden(value: object, lead: str = "\\") -> str:
    """Return the text with hidden characters escaped, e.g. `\\x1b` and `\\u202e`.

    Hidden characters are control characters other than tab and newline, and those in `HIDDEN`. All
    text that is printed or written to pages passes through this function.

    Args:
        lead: Backslash in the syntax of the output format.
    """
    text = "" if value is None else str(value)
    if text.isascii() and text.isprintable():
        return text
    return HIDDEN.sub(lambda found: lead + ascii(found[0])[2:-1], text)


def truncate(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return the text cut to about `max_length` characters, with the number of removed characters.

    Lone surrogates, which cannot be encoded as UTF-8, are escaped.
    """
    if len(text) > max_length + _MARGIN:
        text = f"{text[:max_length]}... ({len(text) - max_length} more characters cut)"
    return text.encode("utf-8", "backslashreplace").decode()


def to_one_line(text: str) -> str:
    """Return the truncated text on one line, with single spaces between words."""
    return " ".join(truncate(text).split())


def message_of(fault: BaseException) -> str:
    """Return the truncated message of an exception on one line, or "" if it has none.

    Safe for exceptions of plug-ins, whose message may be very long or whose `__str__` may fail.
    """
    try:
        text = str(fault)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = "its message cannot be read"
    return to_one_line(text)


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    BAD_ANSWER = 1
    USAGE = 2
    ENVIRONMENT = 3
    BUG = 4
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class SpecbenchError(Exception):
    """An error with a message for the user.

    Message and hint may contain untrusted text. They are cut to about `MAX_TEXT_LENGTH` characters.

    Args:
        message: what is wrong. It names the wrong value and the allowed values.
        hint: how to fix it, preferably a command to type.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = truncate(str(message))
        self.hint = truncate(str(hint)) if hint else None
        super().__init__(self.message)

    def __str__(self) -> str:
        """Return the message with hidden characters escaped, for Python's own tracebacks."""
        return escape_hidden(self.message)


class UsageError(SpecbenchError):
    """The command line, a config file, a plug-in or a data file is wrong (exit 2)."""

    exit_code = ExitCode.USAGE


class PromptError(UsageError):
    """The model cannot decode a prompt: it has no tokens or too many, or its chat template fails.

    If found before the measurement, the run ends (exit 2). In a later turn, only that turn fails.
    """


class EnvironmentFault(SpecbenchError):
    """This machine lacks something: weights, data, an extra, a device, or idle CPUs (exit 3)."""

    exit_code = ExitCode.ENVIRONMENT


class WorkerLost(EnvironmentFault):
    """A worker process of a method that drafts in parallel died or hangs (exit 3).

    The method itself is not the cause.
    """


class ConcurrentWriteError(EnvironmentFault):
    """Another program changed the files of a run while specbench wrote them (exit 3)."""


class BadAnswer(SpecbenchError):
    """Outputs violate a method's guarantee, and the command needs correct outputs (exit 1)."""

    exit_code = ExitCode.BAD_ANSWER


class MethodFault(SpecbenchError):
    """A method violated the interface of the engine, e.g. with a malformed draft (exit 1).

    The measurement of that prompt fails.
    """

    exit_code = ExitCode.BAD_ANSWER


_REASON = 300
"""Maximum number of characters of a library's error in a message."""


def is_library_error(fault: BaseException) -> bool:
    """Return True for an exception that a library or plug-in raised.

    Return False for Ctrl-C, for exits and the like. A panic of a Rust library is an exception of a
    library too, although its class is not derived from Exception and no module exports it.
    """
    return isinstance(fault, Exception) or type(fault).__name__ == "PanicException"


def reason_of(fault: object) -> str:
    """Return the text of a library's error or of a wrong value. It is truncated and on one line."""
    text = " ".join(str(fault)[: 4 * _REASON].split()) or type(fault).__name__
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers of a full or failing disk, a quota, or a limit of the file size."""

REFUSED = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
"""Error numbers of failed writes: those of a full disk, and missing permissions."""


def to_write_error(fault: OSError, resumed: str | None = None) -> EnvironmentFault | None:
    """Return the error to report for an OSError. Return None if the OSError is not a failed write.

    Args:
        resumed: Command with which the user can resume the run. None if nothing can be resumed.
    """
    if fault.errno not in REFUSED or (fault.errno == errno.EIO and fault.filename is None):
        return None
    return EnvironmentFault(
        f"{file_of(fault) or 'a file'}: {fault.strerror}",
        "free some space, or permit the access"
        + (f"; finished results are stored, {resumed} continues from there" if resumed else ""),
    )


def find_disk_error(fault: BaseException) -> OSError | None:
    """Return an OSError if a library's exception means that the disk is full, else None."""
    number = next((each for each in sorted(FULL) if os.strerror(each) in str(fault)), None)
    if number is None:
        return None
    return OSError(number, os.strerror(number), file_of(fault))


def file_of(fault: BaseException) -> str | None:
    """Return the name of the file that could not be written, or None if it is unknown.

    An OSError of `open` names the file, but an OSError of `write` does not. Then the file is
    searched among the local variables of the traceback, innermost frame first.
    """
    if (named := getattr(fault, "filename", None)) is not None:
        return str(named)
    paths: list[Path] = []
    frames = [frame for frame, _ in traceback.walk_tb(fault.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str) and not str(getattr(value, "mode", "w")).startswith("r"):
                return name
            if isinstance(value, Path):
                paths.append(value)
    return str(paths[0]) if paths else None
