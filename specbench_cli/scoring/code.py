"""Generated code: is it a known program, does it pass its unit tests (HumanEval, MBPP)?

`same_code` runs nothing. `tested` runs an answer in a process that can do little harm: in a fresh
interpreter (`python -I`), in an empty temporary folder that is deleted, without environment
variables, input or output, in a session of its own that is killed as a whole, and under limits on
time, memory, open files, file sizes and processes. That contains mistakes: endless loops, exhausted
memory, stray files. It is **no jail**: code that means harm can still read what the user can read
and reach the network; answers of a model that is not trusted belong in a container. Needs a POSIX
system.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator

TIMEOUT_S = 20.0
"""Longest run of one answer's tests on the clock."""

CPU_S = 10
"""The same in CPU time, which a busy machine does not stretch."""

MEMORY_BYTES = 2 * 1024**3
FILE_BYTES = 1024**2
OPEN_FILES = 64
PROCESSES = 64

_PASSED = 86  # an exit code that nothing ends with by chance: `sys.exit(0)` in an answer is no pass
_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
"""What Python raises on a text that is no program."""

_FENCED = re.compile(r"```[ \t]*(?:python|py)?[^\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_OUTSIDE = re.compile(r"\n(?=\S)")
_DEFINITION = re.compile(r"^(?:def|class|import|from|@)\b", re.MULTILINE)

_RUN = f"""
import os, resource, sys
def limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
limit(resource.RLIMIT_CPU, {CPU_S})
limit(resource.RLIMIT_AS, {MEMORY_BYTES})
limit(resource.RLIMIT_FSIZE, {FILE_BYTES})
limit(resource.RLIMIT_NOFILE, {OPEN_FILES})
limit(resource.RLIMIT_NPROC, {PROCESSES})
limit(resource.RLIMIT_CORE, 0)
program = sys.stdin.read()
sys.stdin.close()
exec(compile(program, "answer", "exec"), {{"__name__": "__main__"}})
os._exit({_PASSED})
"""
"""What the fresh interpreter does; the program comes through its standard input."""


def tested(answer: str, before: str, after: str) -> bool:
    """Whether an answer passes its tests.

    Args:
        answer: what a model wrote: code, code among other text in a fenced block, or the lines that
            go on from the prompt.
        before: the code that comes first (HumanEval's prompt).
        after: the code that tests.
    """
    programs = (f"{before}{code}{after}" for code in _readings(answer))
    program = next(filter(_compiles, programs), None)
    return program is not None and _passes(program)


def same_code(reference: str, answer: str) -> bool:
    """Whether an answer is the reference's program, layout and comments aside; nothing is run.

    Args:
        reference: a program that compiles.
        answer: what a model wrote: code, or code among other text in a fenced block.
    """
    wanted = _tree(reference)
    return wanted is not None and any(_tree(code) == wanted for code in _readings(answer))


def _tree(code: str) -> str | None:
    """The syntax tree as text, None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's odd escapes
        try:
            return ast.dump(ast.parse(code))
        except _UNPARSED:
            return None


def _readings(answer: str) -> Iterator[str]:
    """What of an answer may be meant as code, likeliest first."""
    fenced = _FENCED.search(answer)
    code = fenced[1] if fenced else answer
    if _starts_indented(code):  # goes on inside the function: whatever is outside comes after it
        yield _OUTSIDE.split(code, maxsplit=1)[0]
    yield code
    yield textwrap.dedent(code)
    if definition := _DEFINITION.search(code):  # after some words
        yield code[definition.start() :]
    yield textwrap.indent(textwrap.dedent(code), "    ")


def _starts_indented(code: str) -> bool:
    return code.lstrip("\r\n")[:1] in (" ", "\t")


def _compiles(program: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's odd escapes
        try:
            compile(program, "answer", "exec")
        except _UNPARSED:
            return False
    return True


def _passes(program: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as empty:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=empty,
            env={},
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(program.encode("utf-8", "replace"), timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # and whatever the program started
            child.wait()
    return child.returncode == _PASSED
