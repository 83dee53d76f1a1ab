"""Plug-ins: import of a Python file that defines methods, and checks of these methods."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from specbench_cli.api import Method
from specbench_cli.config import plugin_file
from specbench_cli.config.problems import shorten
from specbench_cli.errors import UsageError, message_of
from specbench_cli.time_limit import limit_time

IMPORT_S = 120.0
"""Time limit in seconds for the import of a plug-in."""

MAX_NAME_LENGTH = 64
"""Maximum number of characters of a method name."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._+:-]*")


def read(path: str) -> dict[str, type[Method]]:
    """Import a Python file and return the methods that it defines, by name.

    A method without `name` is named after its class: `RepeatLast` is "repeat-last".

    Raises:
        UsageError: The file does not exist, fails to import, or defines no method.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"the plug-in file {path} does not exist", "--plugin FILE.py")
    found = {_name(method): method for method in _methods_in(_import_file(file))}
    for name in found:
        check_name(name, path)
    if not found:
        raise UsageError(
            f"{path} defines no method",
            "subclass specbench_cli.api.Method (see docs/tutorials/add-a-method.md)",
        )
    for method in found.values():
        _check_attributes(path, method)
    return found


def check_name(name: object, origin: str) -> None:
    """Raise UsageError unless a method name is valid on the command line and as a file name.

    Args:
        origin: the file or package that defines the method, for the error message.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise UsageError(
            f"{origin}: {shorten(repr(name))} is not a valid method name: use up to"
            f" {MAX_NAME_LENGTH} lower-case letters, digits and the characters . _ - + :",
            'give the class another `name = "..."`, such as "my-method"',
        )


def _check_attributes(path: str, method: type[Method]) -> None:
    """Raise UsageError if a class attribute of a method has another type than in the class
    `Method`.
    """
    for name, hint in get_type_hints(Method).items():
        value = inspect.getattr_static(method, name, None)
        if get_origin(hint) is not ClassVar or isinstance(value, property) or value is None:
            continue
        (kind,) = get_args(hint)
        value = frozenset(value) if isinstance(value, set) else value
        try:
            TypeAdapter(kind, config={"arbitrary_types_allowed": True}).validate_python(
                value, strict=True
            )
        except ValidationError:
            raise UsageError(
                f"{path}: `{name}` of {method.__name__} is"
                f" {shorten(repr(value))},"
                f" of type {type(value).__name__}",
                f"`{name}` must be {_words(kind)}, as in {name} = {_example(name)}",
            ) from None


def _words(kind: Any) -> str:
    """Return a Python type as text, as it is written in source code."""
    return (
        kind.__name__
        if isinstance(kind, type) and not get_args(kind)
        else str(kind).replace("typing.", "")
    )


def _example(name: str) -> str:
    """Return an example value for a class attribute, as source code for an error message."""
    examples = {"needs": 'frozenset({"draft"})', "Params": "MethodParams", "name": '"my-method"'}
    return examples.get(name) or repr(getattr(Method, name))


def _import_file(file: Path) -> ModuleType:
    """Import a plug-in file as a module.

    The module's name in `sys.modules` depends on the path and the content of the file.
    """
    source = plugin_file.content(file)
    identity = sha256(str(file.resolve()).encode() + source)
    module_name = f"specbench_plugin_{identity.hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None:
        raise UsageError(f"{file} is not a Python file", "--plugin FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        # Compile the source text here. Python's import system could use an outdated bytecode cache
        # if the file was changed within one second and kept its size.
        message = f"its import took longer than {IMPORT_S:g} s"
        with limit_time(IMPORT_S, message, again_s=1.0):
            exec(compile(source, file, "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as fault:
        del sys.modules[module_name]
        raise UsageError(
            f"{file}:{_line(fault, file)}: {type(fault).__name__}: {_reason(fault)}",
            "the file must import without errors before its methods can run",
        ) from fault
    return module


def _line(fault: BaseException, file: Path) -> int:
    """Return the line number in the plug-in file at which an error occurred."""
    if isinstance(fault, SyntaxError) and fault.lineno:
        return fault.lineno
    frames = traceback.extract_tb(fault.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename) == file and f.lineno]
    return lines[-1] if lines else 1


def _reason(fault: BaseException) -> str:
    return fault.msg if isinstance(fault, SyntaxError) else message_of(fault)


def _methods_in(module: ModuleType) -> list[type[Method]]:
    """Return the methods that a module defines, except abstract and private classes."""
    return [
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and issubclass(member, Method)
        and member.__module__ == module.__name__
        and not inspect.isabstract(member)
        and not member.__name__.startswith("_")
    ]


def _name(method: type[Method]) -> str:
    """Return a method's `name`, or its class name in lower case with hyphens between words."""
    if "name" not in vars(method):
        method.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", method.__name__).lower()
    return method.name
