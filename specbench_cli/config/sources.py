"""Where a run's values come from: options, --set, variables, files. Each source gives a `Given`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specbench_cli.config import document
from specbench_cli.config.problems import did_you_mean
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError

OTHER_VARIABLES = frozenset(
    {"SPECBENCH_CACHE", "SPECBENCH_DATA", "SPECBENCH_DEBUG", "SPECBENCH_LINEAR"}
)
"""Variables of the same prefix that are no option of a run."""


class Sourced(NamedTuple):
    """A value and where it came from: `--limit`, `SPECBENCH_LIMIT`, `specbench.yaml:3`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Given:
    """What one source says, or several together.

    Attributes:
        fields: values of RunConfig's fields, `set` aside.
        params: values of methods' parameters, by (method, parameter).
    """

    fields: dict[str, Sourced] = field(default_factory=dict)
    params: dict[tuple[str, str], Sourced] = field(default_factory=dict)

    def __or__(self, over: Given) -> Given:
        """Both; where both speak, `over` counts."""
        return Given(self.fields | over.fields, self.params | over.params)


def option(name: str) -> str:
    """The command-line option of a field: `--max-new-tokens`."""
    singular = {"methods": "method", "tasks": "task", "plugins": "plugin"}
    return "--" + singular.get(name, name).replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field: `SPECBENCH_MAX_NEW_TOKENS`."""
    return "SPECBENCH_" + option(name)[2:].replace("-", "_").upper()


def from_flags(flags: Mapping[str, Any]) -> Given:
    """The options that were given."""
    return Given(fields={name: Sourced(value, option(name)) for name, value in flags.items()})


def from_sets(sets: Sequence[str]) -> Given:
    """`METHOD.PARAM=VALUE` texts, the value read as a YAML scalar."""
    given = Given()
    for text in sets:
        key, _, value = text.partition("=")
        method, _, param = key.strip().rpartition(".")
        if not (method and param and value.strip()):
            name = key.strip().replace("-", "_")
            instead = f"{option(name)} VALUE" if name in RunConfig.model_fields else None
            raise UsageError(
                f"--set must be METHOD.PARAM=VALUE, got {text!r}", instead or "--set sps.length=7"
            )
        given.params[method, param] = Sourced(_scalar(value.strip()), "--set")
    return given


def from_env(env: Mapping[str, str]) -> Given:
    """The SPECBENCH_* variables that are options; empty ones count as not given."""
    names = {variable(name): name for name in RunConfig.model_fields if name != "set"}
    given = Given()
    for word, value in env.items():
        if not word.startswith("SPECBENCH_") or word in OTHER_VARIABLES or not value:
            continue
        if word not in names:
            guess = did_you_mean(word, [*names, *OTHER_VARIABLES])
            raise UsageError(f"the variable {word} is not known{guess}", f"unset {word}")
        given.fields[names[word]] = Sourced(value, word)
    return given


def from_file(path: Path) -> Given:
    """A config file's values. Raises UsageError, with the line, where it is no config file."""
    found = document.read(path)
    given = Given()
    for key, value in found.values.items():
        if key != "set":
            given.fields[str(key)] = Sourced(value, found.where(str(key)))
            continue
        if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
            raise UsageError(
                f"{found.where('set')}: set must hold methods, and each method its parameters",
                "set: {sps: {length: 7}}",
            )
        for method, params in value.items():
            for param, setting in params.items():
                source = found.where(f"set.{method}.{param}")
                given.params[str(method), str(param)] = Sourced(setting, source)
    return given


def _scalar(text: str) -> Any:
    """A number, true, false, null or else the text itself."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, (bool, int, float, str)) else text
