"""Where a run's values come from: options, --set, variables, files. Each source gives a `Given`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specbench_cli.config import document, sweep
from specbench_cli.config.options import option_name
from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import UsageError

OTHER_VARIABLES = frozenset(
    {
        "SPECBENCH_CACHE",
        "SPECBENCH_DATA",
        "SPECBENCH_DEBUG",
        "SPECBENCH_LINEAR",
        "SPECBENCH_WORKER_TIMEOUT",
    }
)
"""Variables of the same prefix that are no option of a run."""

BLOCKS = {
    "set": "set: {sps: {length: 7}}",
    "sweep": "sweep: {sps: {length: 1:6:1}}",
}
"""Fields that hold methods with their parameters, and how a config file writes them."""

CALL = "run()"
"""The source of what `specbench_cli.run` was called with."""

ANSWERED = ("--set", CALL)
"""Sources of parameters that are for this run alone: each must find its method among the rows."""


class Sourced(NamedTuple):
    """A value and where it came from: `--limit`, `SPECBENCH_LIMIT`, `specbench.yaml:3`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Given:
    """What one source says, or several together.

    Attributes:
        fields: values of RunConfig's fields, `set` and `sweep` aside.
        params: values of methods' parameters, by (method, parameter).
        swept: lists of values of methods' parameters, by (method, parameter).
    """

    fields: dict[str, Sourced] = field(default_factory=dict)
    params: dict[tuple[str, str], Sourced] = field(default_factory=dict)
    swept: dict[tuple[str, str], Sourced] = field(default_factory=dict)

    def __or__(self, over: Given) -> Given:
        """Both; where both speak, `over` counts."""
        return Given(self.fields | over.fields, self.params | over.params, self.swept | over.swept)


def variable(name: str) -> str:
    """The environment variable of a field: `SPECBENCH_MAX_NEW_TOKENS`."""
    return "SPECBENCH_" + option_name(name)[2:].replace("-", "_").upper()


def from_command_line(
    flags: Mapping[str, Any], sets: Sequence[str] = (), sweeps: Sequence[str] = ()
) -> Given:
    """Return what the command line sets.

    Args:
        flags: values of options, by field name.
        sets: `METHOD.PARAM=VALUE` texts of --set.
        sweeps: `METHOD.PARAM=VALUES` texts of --sweep.
    """
    return from_sweeps(sweeps) | from_sets(sets) | from_flags(flags)


def from_flags(flags: Mapping[str, Any]) -> Given:
    """The options that were given."""
    return Given(fields={name: Sourced(value, option_name(name)) for name, value in flags.items()})


def from_sets(sets: Sequence[str]) -> Given:
    """`METHOD.PARAM=VALUE` texts, the value read as a YAML scalar."""
    given = Given()
    for text in sets:
        method, param, value = _parted(text, "--set", "VALUE", "7")
        given.params[method, param] = Sourced(document.scalar(value), "--set")
    return given


def from_sweeps(sweeps: Sequence[str]) -> Given:
    """`METHOD.PARAM=VALUES` texts, the values a range or a list."""
    given = Given()
    for text in sweeps:
        method, param, values = _parted(text, "--sweep", "VALUES", "1:6:1")
        if (method, param) in given.swept:
            raise UsageError(
                f"--sweep {method}.{param} is given twice", f"--sweep {method}.{param}=3,5,7"
            )
        try:
            given.swept[method, param] = Sourced(sweep.values(values), "--sweep")
        except ValueError as fault:
            raise UsageError(
                f"--sweep {method}.{param} {fault}", f"--sweep {method}.{param}=1:6:1"
            ) from fault
    return given


def _parted(text: str, where: str, values: str, example: str) -> tuple[str, str, str]:
    """Method, parameter and value of METHOD.PARAM=VALUE."""
    key, _, value = text.partition("=")
    method, _, param = key.strip().rpartition(".")
    if not (method and param and value.strip()):
        from specbench_cli.config.run import RunConfig

        name = key.strip().replace("-", "_")
        instead = f"{option_name(name)} VALUE" if name in RunConfig.model_fields else None
        raise UsageError(
            f"{where} must be METHOD.PARAM={values}, got {text!r}",
            instead or f"{where} sps.length={example}",
        )
    return method, param, value.strip()


def from_env(env: Mapping[str, str]) -> Given:
    """The SPECBENCH_* variables that are options; empty ones count as not given."""
    from specbench_cli.config.run import RunConfig

    names = {variable(name): name for name in RunConfig.model_fields if name not in BLOCKS}
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
    return _from_document(document.read(path))


def from_call(settings: Mapping[str, Any]) -> Given:
    """The arguments of a call, by the names and forms of a config file's keys. Raises
    UsageError."""
    swept = settings.get("sweep")
    texts = {
        f"sweep.{method}.{param}": values
        for method, params in (swept.items() if isinstance(swept, dict) else ())
        for param, values in (params.items() if isinstance(params, dict) else ())
        if isinstance(values, str)
    }
    return _from_document(document.Document(CALL, dict(settings), {}, texts))


def _from_document(found: document.Document) -> Given:
    given = Given()
    for key, value in found.values.items():
        if key not in BLOCKS:
            given.fields[str(key)] = Sourced(value, found.where(str(key)))
            continue
        if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
            raise UsageError(
                f"{found.where(key)}: {key} must hold methods, and each method its parameters",
                BLOCKS[key],
            )
        for method, params in value.items():
            for param, setting in params.items():
                source = found.where(f"{key}.{method}.{param}")
                at = str(method), str(param)
                if key == "set":
                    given.params[at] = Sourced(setting, source)
                else:
                    given.swept[at] = Sourced(_listed(found, at, setting), source)
    return given


def _listed(found: document.Document, at: tuple[str, str], setting: Any) -> list[Any]:
    """The values that a config file sweeps a parameter over."""
    key = "sweep." + ".".join(at)
    try:
        if key in found.texts:
            return sweep.values(found.texts[key])
        if not isinstance(setting, list) or any(isinstance(v, (list, dict)) for v in setting):
            raise ValueError(f"must be {sweep.FORM}, got {setting!r}")
        return sweep.distinct(setting)
    except ValueError as fault:
        raise UsageError(f"{found.where(key)}: {key} {fault}", BLOCKS["sweep"]) from fault
