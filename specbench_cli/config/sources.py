"""Sources of a run's settings: options, environment variables, config files and Python calls.

Each source returns its settings as a `SettingsLayer`. `load` merges the layers.
"""

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
"""Variables that begin with SPECBENCH_ and are not settings of a run."""

PARAM_FIELDS = {
    "set": "set: {sps: {length: 7}}",
    "sweep": "sweep: {sps: {length: 1:6:1}}",
}
"""Fields of `RunConfig` that contain method parameters, each with an example for config files."""

CALL = "run()"
"""Name of the source for arguments of `specbench_cli.run`."""

EXPLICIT_SOURCES = ("--set", CALL)
"""Sources in which a parameter of a method that is not measured is an error."""


class SourcedValue(NamedTuple):
    """A value of a setting and where it comes from: `--limit`, `SPECBENCH_LIMIT`,
    `specbench.yaml:3`.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class SettingsLayer:
    """Settings from one source, or merged from several sources.

    Attributes:
        fields: Values of the fields of `RunConfig`, except `set` and `sweep`.
        params: Values of method parameters, by (method, parameter).
        sweeps: Lists of values of swept method parameters, by (method, parameter).
    """

    fields: dict[str, SourcedValue] = field(default_factory=dict)
    params: dict[tuple[str, str], SourcedValue] = field(default_factory=dict)
    sweeps: dict[tuple[str, str], SourcedValue] = field(default_factory=dict)

    def __or__(self, over: SettingsLayer) -> SettingsLayer:
        """Merge two layers of settings. The values of `over` take precedence."""
        return SettingsLayer(
            self.fields | over.fields, self.params | over.params, self.sweeps | over.sweeps
        )


def variable_name(name: str) -> str:
    """Return the environment variable for a setting, e.g. `SPECBENCH_MAX_NEW_TOKENS`."""
    return "SPECBENCH_" + option_name(name)[2:].replace("-", "_").upper()


def from_command_line(
    flags: Mapping[str, Any], sets: Sequence[str] = (), sweeps: Sequence[str] = ()
) -> SettingsLayer:
    """Return the settings from the command line.

    Args:
        flags: values of options, by field name.
        sets: `METHOD.PARAM=VALUE` texts of --set.
        sweeps: `METHOD.PARAM=VALUES` texts of --sweep.
    """
    return from_sweeps(sweeps) | from_sets(sets) | from_flags(flags)


def from_flags(flags: Mapping[str, Any]) -> SettingsLayer:
    """Return the settings from options other than --set and --sweep."""
    return SettingsLayer(
        fields={name: SourcedValue(value, option_name(name)) for name, value in flags.items()}
    )


def from_sets(sets: Sequence[str]) -> SettingsLayer:
    """Parse values of --set, such as `sps.length=7`. The part after `=` is parsed as a YAML
    scalar.
    """
    layer = SettingsLayer()
    for text in sets:
        method, param, value = _split_assignment(text, "--set", "VALUE", "7")
        layer.params[method, param] = SourcedValue(document.parse_scalar(value), "--set")
    return layer


def from_sweeps(sweeps: Sequence[str]) -> SettingsLayer:
    """Parse values of --sweep, such as `sps.length=3,5` or `sps.length=1:6:1`."""
    layer = SettingsLayer()
    for text in sweeps:
        method, param, values = _split_assignment(text, "--sweep", "VALUES", "1:6:1")
        if (method, param) in layer.sweeps:
            raise UsageError(
                f"--sweep {method}.{param} is given twice", f"--sweep {method}.{param}=3,5,7"
            )
        try:
            layer.sweeps[method, param] = SourcedValue(sweep.parse_values(values), "--sweep")
        except ValueError as fault:
            raise UsageError(
                f"--sweep {method}.{param} {fault}", f"--sweep {method}.{param}=1:6:1"
            ) from fault
    return layer


def _split_assignment(text: str, where: str, values: str, example: str) -> tuple[str, str, str]:
    """Split METHOD.PARAM=VALUE into method, parameter and value.

    Args:
        where: Name of the option, for the error message.
        values: Placeholder of the value, for the error message.
        example: Example of a value, for the error message.
    """
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


def from_env(env: Mapping[str, str]) -> SettingsLayer:
    """Return the settings from SPECBENCH_* environment variables. Empty variables are ignored."""
    from specbench_cli.config.run import RunConfig

    names = {
        variable_name(name): name for name in RunConfig.model_fields if name not in PARAM_FIELDS
    }
    layer = SettingsLayer()
    for word, value in env.items():
        if not word.startswith("SPECBENCH_") or word in OTHER_VARIABLES or not value:
            continue
        if word not in names:
            guess = did_you_mean(word, [*names, *OTHER_VARIABLES])
            raise UsageError(
                f"the environment variable {word} is not known{guess}", f"unset {word}"
            )
        layer.fields[names[word]] = SourcedValue(value, word)
    return layer


def from_file(path: Path) -> SettingsLayer:
    """Return the settings from a config file.

    Raises:
        UsageError: The file is not a valid config file. The message names the line.
    """
    return _from_document(document.read(path))


def from_call(settings: Mapping[str, Any]) -> SettingsLayer:
    """Return the settings from a Python call, whose arguments are like the keys of a config file.

    Raises:
        UsageError: A `set` or `sweep` argument is invalid.
    """
    swept = settings.get("sweep")
    texts = {
        f"sweep.{method}.{param}": values
        for method, params in (swept.items() if isinstance(swept, dict) else ())
        for param, values in (params.items() if isinstance(params, dict) else ())
        if isinstance(values, str)
    }
    return _from_document(document.YamlDocument(CALL, dict(settings), {}, texts))


def _from_document(found: document.YamlDocument) -> SettingsLayer:
    layer = SettingsLayer()
    for key, value in found.values.items():
        if key not in PARAM_FIELDS:
            layer.fields[str(key)] = SourcedValue(value, found.locate(str(key)))
            continue
        if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
            raise UsageError(
                f"{found.locate(key)}: {key} must be a mapping from methods to parameters",
                PARAM_FIELDS[key],
            )
        for method, params in value.items():
            for param, setting in params.items():
                source = found.locate(f"{key}.{method}.{param}")
                at = str(method), str(param)
                if key == "set":
                    layer.params[at] = SourcedValue(setting, source)
                else:
                    layer.sweeps[at] = SourcedValue(_parse_sweep(found, at, setting), source)
    return layer


def _parse_sweep(found: document.YamlDocument, at: tuple[str, str], setting: Any) -> list[Any]:
    """Return the values to try for a swept parameter in a config file."""
    key = "sweep." + ".".join(at)
    try:
        if key in found.texts:
            return sweep.parse_values(found.texts[key])
        if not isinstance(setting, list) or any(isinstance(v, (list, dict)) for v in setting):
            raise ValueError(f"must be {sweep.SYNTAX}, got {setting!r}")
        return sweep.check_distinct(setting)
    except ValueError as fault:
        raise UsageError(f"{found.locate(key)}: {key} {fault}", PARAM_FIELDS["sweep"]) from fault
