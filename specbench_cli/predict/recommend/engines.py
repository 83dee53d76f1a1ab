"""Commands that start a method in serving engines such as vLLM, from templates in engines.yaml.

The file also has the address of the documentation against which each template was checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

_ROOT = "_and_root"
"""Suffix of a parameter name in a template, for its value plus one. Some engines count the root of
a draft tree as a node."""


class _EngineModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CommandForm(_EngineModel):
    """Template of the command that starts a method in a serving engine.

    text: the template, with placeholders for the names of the models.
    when: parameters of the method for which the template is valid.
    note: remark for the user.
    """

    text: str
    when: dict[str, Any] = {}
    note: str = ""


class ServingEngine(_EngineModel):
    """Entry of an engine in `engines.yaml`."""

    name: str
    version: str = Field(min_length=1)
    checked: str = Field(pattern="^https://")
    form: Literal["shell", "yaml", "python"]
    note: str = ""
    methods: dict[str, list[CommandForm]]


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """Command to start a method in an engine.

    lacks: reason if the engine does not support the method, else "". Without support, text and note
        are empty.
    """

    engine: str
    version: str
    checked: str
    form: str
    text: str
    note: str
    lacks: str


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Names of the models of a method: a hub id or a folder each. None if there is no
    such model.
    """

    target: str
    draft: str | None = None
    head: str | None = None

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the placeholders of `engines.yaml` with their values."""
        for role in ("target", "draft", "head"):
            name = getattr(self, role)
            if name is not None:
                yield role, name
                yield f"{role}_name", name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


@cache
def load_engines() -> tuple[ServingEngine, ...]:
    """Return the serving engines in the order of `engines.yaml`."""
    text = files("specbench_cli.predict.recommend").joinpath("engines.yaml").read_text("utf-8")
    return tuple(ServingEngine.model_validate(each) for each in yaml.safe_load(text)["engines"])


def launch_commands(
    method: str, params: Mapping[str, Any], models: ServedModels
) -> list[LaunchCommand]:
    """Return the command of every engine for a method.

    Args:
        params: parameters of the method that take effect.
    """
    return [_fill_command(engine, method, params, models) for engine in load_engines()]


def _fill_command(
    engine: ServingEngine, method: str, params: Mapping[str, Any], models: ServedModels
) -> LaunchCommand:
    facts = (engine.name, engine.version, engine.checked, engine.form)
    forms = engine.methods.get(method)
    if forms is None:
        return LaunchCommand(*facts, "", "", f"does not support {method}")
    form = next((each for each in forms if _matches(each, params)), None)
    if form is None:
        settings = ", ".join(f"{name}={params.get(name)}" for each in forms for name in each.when)
        return LaunchCommand(*facts, "", "", f"does not support {method} with {settings}")
    known = dict(models.names()) | dict(_numbers(params))
    wanted = Template(form.text).get_identifiers()
    if lacking := [name for name in wanted if name not in known]:
        why = ", ".join(f"{name}={params.get(name.removesuffix(_ROOT))}" for name in lacking)
        return LaunchCommand(*facts, "", "", f"does not support {method} with {why}")
    text = Template(form.text).substitute(known)
    notes = "; ".join(filter(None, (engine.note, form.note)))
    return LaunchCommand(*facts, text, Template(notes).safe_substitute(known), "")


def _matches(form: CommandForm, params: Mapping[str, Any]) -> bool:
    return all(params.get(name) == value for name, value in form.when.items())


def _numbers(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in params.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, f"{value:g}" if isinstance(value, float) else str(value)
            if isinstance(value, int):
                yield name + _ROOT, str(value + 1)
