"""Command-line options that are derived from the fields of config models.

A field declares its option once, as an `Option` in its annotation. The command line, the help, the
commented config file of `specbench init` and the JSON schema are generated from it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_origin

import typer

from specbench_cli.config.sources import option as option_name

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

M = TypeVar("M", bound="BaseModel")

WHAT, DECODING, MEASURING, OUTPUT = "What to run", "Decoding", "Measuring", "Output"
PANELS = (WHAT, DECODING, MEASURING, OUTPUT)
"""Headings of the help of `specbench run`, in order."""


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option of a field.

    Attributes:
        panel: help panel that lists the option.
        metavar: placeholder for the value; None for a switch.
        help: help text of one or two sentences.
        default: the default as the help shows it, if it differs from the field's default.
        short: short name, such as "-m".
        name: name of the option, if it differs from the field's name.
        choices: values that the command line accepts, if the field's type allows more.
        as_text: True if the command line passes on any text, which the model validates.
        complete: "module:function" that returns the words for shell completion.
        hidden: True if the help does not list the option.
    """

    panel: str
    metavar: str | None
    help: str
    default: str | None = None
    short: str | None = None
    name: str | None = None
    as_text: bool = False
    choices: tuple[str, ...] = ()
    complete: str | None = None
    hidden: bool = False


TRUST = Option(
    OUTPUT, None, "Permit plug-ins that ./specbench.yaml or the folder of --resume names."
)
"""Option of every command that may import a plug-in named by a folder."""


class Setting(NamedTuple):
    """A field of a config model together with its option."""

    name: str
    field: FieldInfo
    option: Option

    @property
    def default(self) -> str:
        """Default value as help and config files show it."""
        value = self.field.default
        if self.option.default is not None:
            return self.option.default
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, list):
            return ",".join(map(str, value)) or "none"
        return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def settings(model: type[BaseModel]) -> Iterator[Setting]:
    """Yield the fields of a model that have an option, in the order of the help."""
    found = [
        Setting(name, field, option)
        for name, field in model.model_fields.items()
        for option in field.metadata
        if isinstance(option, Option)
    ]
    panels = [each.option.panel for each in found]
    yield from sorted(found, key=lambda each: panels.index(each.option.panel))


@dataclass(frozen=True, slots=True)
class OptionSubset:
    """Selection of options of a config model, for another command.

    Attributes:
        model: the config model as "module:class".
        fields: field names in the order of the help, each with the attributes of its `Option` that
            this command changes.
    """

    model: str
    fields: Mapping[str, Mapping[str, Any]]

    def settings(self) -> list[Setting]:
        """Return the chosen settings."""
        known = {each.name: each for each in settings(_import_attribute(self.model))}
        return [
            known[name]._replace(option=replace(known[name].option, **changes))
            for name, changes in self.fields.items()
        ]


def command(*models: str | OptionSubset) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of config models to a command.

    The decorated function takes one mapping per model, from field names to the text that the user
    typed. The model converts and validates these texts.

    Args:
        models: config models as "module:class", or an `OptionSubset`. They are imported when the
            command is built, because importing pydantic would slow down the help of all commands.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.build = functools.partial(_build, function, models)  # type: ignore[attr-defined]
        return function

    return decorate


def build(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command's function with the signature that typer reads its options from."""
    build: Callable[[], Callable[..., Any]] = getattr(function, "build", lambda: function)
    return build()


def validate(model: type[M], values: Mapping[str, Any], hint: str) -> M:
    """Return a config model of the typed values.

    Raises:
        UsageError: a value is invalid. The error names its option and shows the hint.
    """
    from pydantic import ValidationError

    from specbench_cli.config.problems import usage_error

    try:
        return model.model_validate(dict(values))
    except ValidationError as fault:
        raise usage_error(
            fault,
            subject=lambda place: option_name(str(place[0])) if place else "the options",
            keys=lambda place: list(model.model_fields),
            hint=hint,
        ) from fault


def _build(
    function: Callable[..., Any], models: tuple[str | OptionSubset, ...]
) -> Callable[..., Any]:
    found = [
        each.settings() if isinstance(each, OptionSubset) else [*settings(_import_attribute(each))]
        for each in models
    ]
    parameters = [_parameter(setting) for group in found for setting in group]

    def run(**values: Any) -> Any:
        return function(*(_typed_values(values, group) for group in found))

    run.__doc__, run.__name__ = function.__doc__, function.__name__
    # typer reads both.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _typed_values(values: Mapping[str, Any], group: list[Setting]) -> dict[str, Any]:
    """Return the values of a model's options that the user typed, by field name."""
    typed = {setting.name: values[setting.name] for setting in group}
    return {name: value for name, value in typed.items() if value not in (None, [], False)}


def _import_attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _parameter(setting: Setting) -> inspect.Parameter:
    """Return the function parameter from which typer creates an option."""
    name, field, option = setting
    kind = _parsed_type(field.annotation, option)
    names = [option.name or option_name(name), *([option.short] if option.short else [])]
    declared = typer.Option(
        *names,
        metavar=option.metavar,
        help=option.help,
        show_default=setting.default,
        rich_help_panel=option.panel,
        hidden=option.hidden,
        autocompletion=_completion(option.complete) if option.complete else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, declared],
    )


def _parsed_type(annotation: Any, option: Option) -> Any:
    """Return the type that typer parses a value as: text, unless it is a flag or a choice."""
    if option.choices:
        return Literal[option.choices] | None
    if annotation is bool:
        return bool
    if option.as_text:
        return str | None
    if get_origin(annotation) is Literal:
        return annotation | None
    return list[str] | None if get_origin(annotation) in (list, dict) else str | None


def _completion(names: str) -> Callable[[str], list[str]]:
    """Return a shell completion of the last word in a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _import_attribute(names)()]

    return complete
