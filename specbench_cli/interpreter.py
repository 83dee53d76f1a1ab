"""Commands that start a new Python interpreter, and the number of usable CPUs."""

from __future__ import annotations

import json
import os
import sys

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from importlib import import_module
module, _, function = sys.argv.pop(1).partition(":")
getattr(import_module(module), function)()
"""
"""Program that calls a function with the parent's `sys.path`. `python -m` is not used, because it
searches the working folder first, where a user's file could shadow a module."""

_IGNORE_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def python_command(function: str, *arguments: str, ignores_interrupts: bool = False) -> list[str]:
    """Return the command that calls a function in a new interpreter.

    Args:
        function: "module:function", which is called without arguments.
        arguments: value of `sys.argv[1:]` in the new process.
        ignores_interrupts: True if the process ignores Ctrl-C from its start.
    """
    modules = json.dumps([*map(str, sys.path)])
    program = _IGNORE_INTERRUPTS * ignores_interrupts + _PROGRAM
    return [sys.executable, "-P", "-c", program, modules, function, *arguments]


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    known = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(known(0)) if known else os.cpu_count() or 1
