"""What specbench raises for a person to read, and the exit code each kind ends with.

A message names the value, what is allowed, and (in `hint`) the next command to type. Anything that
is not a `SpecbenchError` is a bug of ours: exit code 4.
"""

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command (design, section 9)."""

    OK = 0
    BAD_ANSWER = 1
    USAGE = 2
    ENVIRONMENT = 3
    BUG = 4
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class SpecbenchError(Exception):
    """An error with a text meant for the user.

    Args:
        message: what is wrong, with the value that was given and what is allowed.
        hint: what to do about it, best a command to type.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecbenchError):
    """The command line, a config file, a plug-in or a data file is wrong (exit 2)."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(SpecbenchError):
    """Something this machine lacks: weights, data, an extra, a device, quiet (exit 3)."""

    exit_code = ExitCode.ENVIRONMENT


class WorkerLost(EnvironmentFault):
    """A worker that computes beside the target died or hangs; no fault of the method's (exit 3)."""


class BadAnswer(SpecbenchError):
    """Outputs that are not what their method claims, where only proved ones are taken (exit 1)."""

    exit_code = ExitCode.BAD_ANSWER


class MethodFault(SpecbenchError):
    """A method broke the engine's contract (a malformed draft, too many tokens): a failed cell."""

    exit_code = ExitCode.BAD_ANSWER


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""A disk that is full or fails, a quota or a limit on a file's size."""

REFUSED = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
"""Those, and a file that may not be touched."""


def not_written(fault: OSError, resumed: str) -> EnvironmentFault | None:
    """What is said of an error of the system; None where it is no file that cannot be written.

    Args:
        resumed: the command that goes on from what was written.
    """
    if fault.errno not in REFUSED or (fault.errno == errno.EIO and fault.filename is None):
        return None
    return EnvironmentFault(
        f"{fault.filename or 'a file'}: {fault.strerror}",
        "free some space, or permit the access; what was kept until then stays, and"
        f" {resumed} goes on from there",
    )
