"""`specbench new-method`: write the skeleton of a method, with its test."""

from __future__ import annotations

import re
from importlib.resources import files as package_files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import output, registry
from specbench_cli.config.options import parsed_command
from specbench_cli.config.problems import shorten
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import NewMethodOptions

EXAMPLES = (
    "specbench new-method my-lookup",
    "specbench new-method my-head --kind head",
    "specbench new-method my-tree --kind tree --out plugins",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_NAME = 40
_TEST = '''\
"""The checks of `specbench audit`, a few cases each. Add facts that only {name} has."""

from pathlib import Path

import pytest

from specbench_cli.testing import CHECKS, check

PLUGIN = Path(__file__).with_name("{module}.py")


@pytest.mark.parametrize("name", CHECKS)
def test_{module}_passes(name):
    check(PLUGIN, name)
'''


@parsed_command("specbench_cli.config.commands:NewMethodOptions")
def new_method(options: NewMethodOptions) -> None:
    """Write the skeleton of a method as a plug-in file, with its test.

    The skeleton passes the audit as it is. Existing files are not overwritten.
    """
    name, kind = options.name, options.kind
    _check_name(name)
    module = name.replace("-", "_")
    plugin = options.out / f"{module}.py"
    contents = {
        plugin: _make_plugin(name, kind),
        options.out / f"test_{module}.py": _TEST.format(name=name, module=module),
    }
    for path in contents:
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} exists already, and is not overwritten",
                f"specbench new-method OTHER-NAME --kind {kind}",
            )
    _write(contents)
    for path in contents:
        output.note(f"wrote {path}")
    output.note("next:")
    output.data(f"specbench audit --plugin {plugin}")
    if kind == "head":
        output.data(f"specbench train head --plugin {plugin} --out heads --smoke")
    else:
        baseline = "pld" if kind == "lookup" else "sps"
        output.data(f"specbench run --plugin {plugin} -m {name},{baseline} --limit 12")


def _check_name(name: str) -> None:
    """Raise UsageError if a new method and its file cannot have this name."""
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"{shorten(repr(name))} cannot be the name of a new method: it takes lower-case"
            f" letters, digits and single hyphens, begins with a letter, and has at most"
            f" {_MAX_NAME} characters",
            "specbench new-method my-method",
        )
    known = registry.entries()
    if name in known or any(name in entry.aliases for entry in known.values()):
        raise UsageError(f"there is a method {name} already", f"specbench new-method my-{name}")
    module = name.replace("-", "_")
    if find_spec(module) is not None:
        raise UsageError(
            f"a file {module}.py would hide the Python package {module}",
            f"specbench new-method my-{name}",
        )


def _make_plugin(name: str, kind: str) -> str:
    """Return the code of the skeleton for a kind of method, with the new method's name in it."""
    skeleton = package_files("specbench_cli.skeletons").joinpath(f"{kind}.py")
    text = skeleton.read_text(encoding="utf-8")
    class_name = "".join(part.capitalize() for part in name.split("-"))
    text = text.replace(f"Skeleton{kind.capitalize()}", class_name)
    return text.replace(f"skeleton-{kind}", name)


def _write(contents: dict[Path, str]) -> None:
    """Write new files. If one of them cannot be written, delete those already written."""
    written: list[Path] = []
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(content)
    except OSError as fault:
        for path in written:
            path.unlink(missing_ok=True)
        raise UsageError(f"cannot write to {path}: {fault.strerror}") from fault
