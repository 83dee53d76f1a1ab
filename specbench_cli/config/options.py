"""Command-line options that are generated from the fields of config models.

A field of a config model has an `Option` in its annotation. From these options, specbench generates
the command line, its help, the commented config file of `specbench init` and the JSON schema.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

M = TypeVar("M", bound="BaseModel")

ARGUMENTS = "Arguments"
"""Value of `Option.panel` for positional arguments."""
WHAT, DECODING, MEASURING, OUTPUT = "What to run", "Decoding", "Measuring", "Output"
PANELS = (WHAT, DECODING, MEASURING, OUTPUT)
"""Headings in the help of `specbench run`, in order."""


def option_name(name: str) -> str:
    """Return the command-line option for a field name, e.g. `--max-new-tokens` for
    `max_new_tokens`.
    """
    singular = {"methods": "method", "tasks": "task", "plugins": "plugin", "prompts": "prompt"}
    return "--" + singular.get(name, name).replace("_", "-")


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option of a field.

    Attributes:
        panel: heading in the help under which the option is listed. `ARGUMENTS` makes the field a
            positional argument.
        metavar: placeholder for the value in the help; None for a switch.
        help: help text of one or two sentences.
        default: text for the default in the help, if it differs from the field's default.
        short: short name, such as "-m".
        name: name of the option, if it differs from the field's name.
        choices: values that the command line accepts, if the field's type allows more.
        as_text: True if the command line accepts any text, and only the model validates it.
        complete: "module:function" that returns the words for shell completion.
        env: environment variable of the option, for options that are not settings of a run.
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
    env: str | None = None
    hidden: bool = False


OVERWRITE = Option(OUTPUT, None, "Overwrite files that specbench did not write.")
"""Option of the commands that write files."""
TRUST = Option(
    OUTPUT,
    None,
    "Permit the plug-ins that ./specbench.yaml or the folder of --resume names. Otherwise specbench"
    " asks at a terminal, and stops with an error without one.",
)
"""Option of the commands that may import a plug-in that a folder names."""


class OptionField(NamedTuple):
    """A field of a config model, together with its command-line option."""

    name: str
    field: FieldInfo
    option: Option

    @property
    def flag(self) -> str:
        """Long name of the option, e.g. `--limit`, or the placeholder of an argument."""
        if self.option.panel == ARGUMENTS:
            return str(self.option.metavar)
        return self.flags[0].partition("/")[0]

    @property
    def flags(self) -> list[str]:
        """Long and short name of the option."""
        long = self.option.name or option_name(self.name)
        return [long, *([self.option.short] if self.option.short else [])]

    @property
    def default(self) -> str:
        """Default value as the help and config files show it."""
        value = self.field.default
        if self.option.default is not None:
            return self.option.default
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, list):
            return ",".join(map(str, value)) or "none"
        return (
            "none"
            if value in (None, {})
            else f"{value:g}"
            if isinstance(value, float)
            else str(value)
        )


def option_fields(model: type[BaseModel]) -> Iterator[OptionField]:
    """Yield those fields of a config model that have a command-line option, in the order of the
    help.
    """
    found = [
        OptionField(name, field, option)
        for name, field in model.model_fields.items()
        for option in field.metadata
        if isinstance(option, Option)
    ]
    panels = [each.option.panel for each in found]
    yield from sorted(found, key=lambda each: panels.index(each.option.panel))


@dataclass(frozen=True, slots=True)
class OptionSubset:
    """Some options of a config model, which another command also accepts.

    Attributes:
        model: the config model as "module:class".
        fields: names of the accepted fields, in the order of the help. Each name is mapped to the
            attributes of `Option` that differ for the other command.
    """

    model: str
    fields: Mapping[str, Mapping[str, Any]]

    def option_fields(self) -> list[OptionField]:
        """Return the fields, with the options as the other command changes them."""
        known = {each.name: each for each in option_fields(_import_attribute(self.model))}
        return [
            known[name]._replace(option=replace(known[name].option, **changes))
            for name, changes in self.fields.items()
        ]


def command(*models: str | OptionSubset) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of config models to a command's function.

    The function receives one mapping per model, from field names to the texts that the user typed.
    It must convert and validate the texts with the models.

    Args:
        models: config models as "module:class", or an `OptionSubset`. They are imported when the
            command is built, because importing pydantic slows down `specbench --help`.
    """

    def find() -> list[list[OptionField]]:
        return [
            each.option_fields() if isinstance(each, OptionSubset) else _model_option_fields(each)
            for each in models
        ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def build_function() -> Callable[..., Any]:
            groups = find()

            def run(**values: Any) -> Any:
                return function(*(_typed_values(values, group) for group in groups))

            return _with_signature(run, function, [_text_parameter(s) for g in groups for s in g])

        return _attach(
            function, build_function, lambda: [each for group in find() for each in group]
        )

    return decorate


def parsed_command(model: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options and arguments of a config model to a command.

    Typer parses the values by the types and bounds of the fields. The command's function receives
    an instance of the model.

    Args:
        model: config model as "module:class", which is imported when the command is built.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def build_function() -> Callable[..., Any]:
            def run(typer_context: typer.Context, **values: Any) -> Any:
                given = {name: value for name, value in values.items() if value is not None}
                hint = f"{typer_context.command_path} --help"
                return function(validate(_import_attribute(model), given, hint))

            context = inspect.Parameter(
                "typer_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
            )
            parameters = [_parsed_parameter(each) for each in _model_option_fields(model)]
            return _with_signature(run, function, [context, *parameters])

        return _attach(function, build_function, lambda: _model_option_fields(model))

    return decorate


def build(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a command's function that has one parameter per option. Typer reads
    these.
    """
    build: Callable[[], Callable[..., Any]] = getattr(function, "build", lambda: function)
    return build()


def command_option_fields(function: Callable[..., Any]) -> list[OptionField]:
    """Return the options and arguments of a command's function, in the order of the help."""
    found: Callable[[], list[OptionField]] = getattr(function, "settings", list)
    return found()


def _model_option_fields(model: str) -> list[OptionField]:
    """Return the option fields of a config model that is given as "module:class"."""
    return list(option_fields(_import_attribute(model)))


def validate(model: type[M], values: Mapping[str, Any], hint: str) -> M:
    """Return an instance of a config model with the values that the user typed.

    Raises:
        UsageError: a value is invalid. The message names the option.
    """
    from pydantic import ValidationError

    from specbench_cli.config.problems import usage_error

    flags = {each.name: each.flag for each in option_fields(model)}
    try:
        return model.model_validate(dict(values))
    except ValidationError as fault:
        raise usage_error(
            fault,
            subject=lambda place: (
                flags.get(str(place[0]), str(place[0])) if place else "the options"
            ),
            keys=lambda place: list(model.model_fields),
            hint=hint,
        ) from fault


def _attach(
    function: Callable[..., Any],
    build: Callable[[], Callable[..., Any]],
    settings: Callable[[], list[OptionField]],
) -> Callable[..., Any]:
    """Store two functions on a command: one builds its options, the other lists them."""
    function.build, function.settings = build, settings  # type: ignore[attr-defined]
    return function


def _with_signature(
    run: Callable[..., Any], function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., Any]:
    """Return `run` with the name and docstring of a command's function, and with the given
    parameters.
    """
    run.__doc__, run.__name__ = function.__doc__, function.__name__
    # Typer reads a function's signature and annotations to create the options.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _typed_values(values: Mapping[str, Any], group: list[OptionField]) -> dict[str, Any]:
    """Return the values that the user typed for one model, by field name."""
    typed = {setting.name: values[setting.name] for setting in group}
    return {name: value for name, value in typed.items() if value not in (None, [], False)}


def _import_attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _text_parameter(setting: OptionField) -> inspect.Parameter:
    """Return the parameter from which typer creates an option with an unparsed text as value."""
    kind = _text_type(setting.field.annotation, setting.option)
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, _make_typer_declaration(setting, setting.default)],
    )


def _parsed_parameter(setting: OptionField) -> inspect.Parameter:
    """Return the parameter from which typer creates an option, with the type that typer parses."""
    field, option = setting.field, setting.option
    kind, bounds = _bounded_type(field)
    default = inspect.Parameter.empty if field.is_required() else field.default
    if default is None or default == []:
        kind, default = kind | None, None
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind, _make_typer_declaration(setting, option.default or True, **bounds)
        ],
    )


def _bounded_type(field: FieldInfo) -> tuple[Any, dict[str, Any]]:
    """Return a field's type for typer. For a number, also return its minimum and maximum."""
    kind, metadata = field.annotation, field.metadata
    items: Any = get_args(kind)[0] if get_origin(kind) is list else None
    if get_origin(items) is Annotated:
        metadata = [bound for inner in items.__metadata__ for bound in inner.metadata]
        kind = list[items.__origin__]
    bounds = {
        name: getattr(each, attribute)
        for each in metadata
        for name, attribute in (("min", "ge"), ("max", "le"))
        if hasattr(each, attribute)
    }
    return kind, bounds


def _make_typer_declaration(setting: OptionField, show_default: str | bool, **bounds: Any) -> Any:
    """Return typer's declaration of an option or argument."""
    option = setting.option
    if option.panel == ARGUMENTS:
        return typer.Argument(
            metavar=option.metavar, help=option.help, show_default=show_default, **bounds
        )
    return typer.Option(
        *setting.flags,
        metavar=option.metavar,
        help=option.help,
        show_default=show_default,
        rich_help_panel=option.panel,
        envvar=option.env,
        hidden=option.hidden,
        autocompletion=_completion(option.complete) if option.complete else None,
        **bounds,
    )


def _text_type(annotation: Any, option: Option) -> Any:
    """Return the type of an unparsed option for typer: text, a switch or a choice."""
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
    """Return a function that completes the last word of a comma-separated list in the shell.

    Args:
        names: "module:function" that returns the possible words.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _import_attribute(names)()]

    return complete
