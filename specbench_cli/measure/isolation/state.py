"""Process-wide state that importing a plug-in must not change, such as settings of torch.

A change would affect all other methods in the same process.
"""

from __future__ import annotations

import builtins
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psutil
import torch

from specbench_cli.measure.environment import variables

StateSnapshot = Mapping[str, Any]
"""State of a process at one time: name of a kind of state -> value."""


CODE = ("the clock", "built-in functions", "specbench's code")
"""State that a plug-in must not change even in its own process, because this code measures it."""


def capture_state(names: Collection[str] | None = None) -> StateSnapshot:
    """Return a snapshot of process-wide state, which `find_changes` compares with the later state.

    Args:
        names: Kinds of state to capture. None captures all kinds.
    """
    return {name: _CAPTURES[name]() for name in (names or _CAPTURES)}


def find_changes(before: StateSnapshot) -> list[str]:
    """Return the kinds of process-wide state that have changed since a snapshot."""
    after = capture_state(before)
    return [name for name in before if not _is_unchanged(before[name], after[name])]


def _is_unchanged(before: Any, after: Any) -> bool:
    """Return True if everything in `before` is also in `after`. Additions are allowed."""
    if not isinstance(before, dict):
        return bool(before == after)
    return all(name in after and after[name] is value for name, value in before.items())


def _torch_settings() -> Any:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.get_default_device(),
    )


def _stream_states() -> Any:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return [(id(stream), stream is None or stream.closed) for stream in streams]


def _code_of_modules(prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the functions and classes of imported modules, by name.

    Methods of classes are included.

    Args:
        prefixes: Names of packages. Only their modules are read.
    """
    found: dict[str, Any] = {}
    for module, content in list(sys.modules.items()):
        if module.partition(".")[0] in prefixes:
            for name, value in list(vars(content).items()):
                if callable(value):
                    found[f"{module}.{name}"] = value
                if isinstance(value, type) and value.__module__ == module:
                    members = list(vars(value).items())
                    found |= {
                        f"{module}.{name}.{of}": each for of, each in members if callable(each)
                    }
    return found


def _torch_code() -> dict[str, Any]:
    owners = {"torch": torch, "functional": torch.nn.functional, "Tensor": torch.Tensor}
    return {
        f"{owner}.{name}": value
        for owner, content in owners.items()
        for name, value in list(vars(content).items())
        if callable(value)
    }


_CAPTURES: dict[str, Callable[[], Any]] = {
    "torch's settings": _torch_settings,
    "the working folder": os.getcwd,
    "the environment": lambda: sorted(variables().items()),
    "signal handlers": lambda: [signal.getsignal(each) for each in sorted(signal.valid_signals())],
    "the interpreter's settings": lambda: (gc.isenabled(), sys.getrecursionlimit()),
    "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
    "processes": lambda: sorted(child.pid for child in psutil.Process().children()),
    "standard streams": _stream_states,
    "the clock": lambda: {name: value for name, value in vars(time).items() if callable(value)},
    "built-in functions": lambda: dict(vars(builtins)),
    "specbench's code": lambda: _code_of_modules(("specbench_cli", "methods")),
    "torch's code": _torch_code,
}
