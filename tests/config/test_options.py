"""Options that are derived from the fields of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import (
    ARGUMENTS,
    DECODING,
    WHAT,
    Option,
    build,
    command,
    command_option_fields,
    option_fields,
    parsed_command,
)
from specbench_cli.errors import UsageError


class Model(BaseModel):
    length: Annotated[int, Option(DECODING, "N", "Draft length.", short="-l")] = Field(5, ge=1)
    scale: Annotated[float, Option(DECODING, "X", "Scale.")] = 2.0
    names: Annotated[
        list[str], Option(WHAT, "NAME", "Names.", complete=f"{__name__}:known_options")
    ] = []
    kind: Annotated[Literal["a", "b"], Option(WHAT, "KIND", "a or b.")] = "a"
    fast: Annotated[bool, Option(WHAT, None, "Be fast.", name="--quick")] = False
    rule: Annotated[str | None, Option(WHAT, "RULE", "x or y.", choices=("x", "y"))] = None
    internal: int = 3


class Parsed(CommandOptions):
    file: Annotated[Path, Option(ARGUMENTS, "FILE", "File.")]
    length: Annotated[int, Field(ge=1, le=9), Option(WHAT, "N", "Length.", short="-l")] = 5
    layers: Annotated[list[Annotated[int, Field(ge=1)]], Option(WHAT, "N", "Layers.")] = Field([])
    kind: Annotated[Literal["a", "b"], Option(WHAT, "KIND", "a or b.")] = "a"
    keep: Annotated[bool, Option(WHAT, None, "Keep.", name="--keep/--drop")] = True
    data: Annotated[Path | None, Option(WHAT, "DIR", "Data.", env="TEST_DATA")] = None
    rate: Annotated[float | None, Field(gt=0), Option(WHAT, "X", "Rate.")] = None


def known_options() -> list[str]:
    return ["sps", "pld"]


def call_command(*args: str) -> Any:
    """Call a command with the options of a model, and return its arguments."""
    found: list[Any] = []

    @command(f"{__name__}:Model")
    def work(values: dict[str, Any]) -> None:
        """Work."""
        found.append(values)

    app = typer.Typer()
    app.command()(build(work))
    result = CliRunner().invoke(app, list(args))
    return found[0] if found else result


@parsed_command(f"{__name__}:Parsed")
def parse(text: Parsed) -> None:
    """Parse."""
    found.append(text)


found: list[Parsed] = []


def parse_model(*args: str, **env: str) -> Any:
    """Call a command that takes a model, and return the model or the call's result."""
    found.clear()
    app = typer.Typer()
    app.command()(build(parse))
    result = CliRunner().invoke(app, list(args), env=env)
    return found[0] if found else result


def test_a_parsed_command_takes_the_model_with_its_defaults():
    assert parse_model("x") == Parsed(file=Path("x"))
    values = parse_model(
        "x", "-l", "7", "--layers", "1", "--layers", "2", "--kind", "b", "--drop", TEST_DATA="d"
    )
    assert values == Parsed(
        file=Path("x"), length=7, layers=[1, 2], kind="b", keep=False, data=Path("d")
    )
    assert values.changed_flags("length", "layers", "rate", "keep") == ["--length", "--layers"]


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("x", "--length", "0"),
        ("x", "--length", "10"),
        ("x", "--layers", "0"),
        ("x", "--kind", "c"),
    ],
)
def test_a_parsed_command_refuses_values_beyond_the_bounds_of_a_field(args):
    assert parse_model(*args).exit_code == 2


def test_the_model_refuses_a_value_that_the_parser_accepts():
    error = parse_model("x", "--rate", "0").exception
    assert isinstance(error, UsageError)
    assert error.message == "--rate must be above 0, got 0.0"


def test_the_options_of_a_command_are_known_without_calling_it():
    assert [each.flag for each in command_option_fields(parse)] == [
        "FILE", "--length", "--layers", "--kind", "--keep", "--data", "--rate",
    ]  # fmt: skip


def test_a_command_gets_the_typed_values_unchanged():
    assert call_command() == {}
    values = call_command("-l", "007", "--names", "u", "--names", "v", "--quick", "--rule", "y")
    assert values == {"length": "007", "names": ["u", "v"], "fast": True, "rule": "y"}


@pytest.mark.parametrize("args", [("--kind", "c"), ("--rule", "z"), ("--internal", "4")])
def test_the_parser_refuses_other_choices_and_fields_without_an_option(args):
    assert call_command(*args).exit_code == 2


def test_options_are_in_panel_order_with_their_defaults():
    found = {each.name: each.default for each in option_fields(Model)}
    assert found == {
        "names": "none", "kind": "a", "fast": "off", "rule": "none", "length": "5", "scale": "2",
    }  # fmt: skip


def test_the_model_is_not_imported_before_the_command_is_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "not_there", None)

    @command("not_there:Model")
    def work(values: dict[str, Any]) -> None:
        """Work."""

    with pytest.raises(ImportError):
        build(work)


def test_the_shell_completes_the_last_word_of_a_list():
    names = next(each for each in option_fields(Model) if each.name == "names")
    from specbench_cli.config.options import _completion

    assert names.option.complete is not None
    assert _completion(names.option.complete)("sps,") == ["sps,sps", "sps,pld"]
