"""Options that are derived from the fields of a model."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from specbench_cli.config.options import DECODING, WHAT, Option, build, command, settings


class Model(BaseModel):
    length: Annotated[int, Option(DECODING, "N", "Draft length.", short="-l")] = Field(5, ge=1)
    scale: Annotated[float, Option(DECODING, "X", "Scale.")] = 2.0
    names: Annotated[list[str], Option(WHAT, "NAME", "Names.", complete=f"{__name__}:known")] = []
    kind: Annotated[Literal["a", "b"], Option(WHAT, "KIND", "a or b.")] = "a"
    fast: Annotated[bool, Option(WHAT, None, "Be fast.", name="--quick")] = False
    rule: Annotated[str | None, Option(WHAT, "RULE", "x or y.", choices=("x", "y"))] = None
    internal: int = 3


def known() -> list[str]:
    return ["sps", "pld"]


def called(*args: str) -> Any:
    """Call a command with the options of a model, and return its arguments."""
    found: list[Any] = []

    @command(f"{__name__}:Model")
    def work(given: dict[str, Any]) -> None:
        """Work."""
        found.append(given)

    app = typer.Typer()
    app.command()(build(work))
    result = CliRunner().invoke(app, list(args))
    return found[0] if found else result


def test_a_command_is_given_what_was_typed_as_it_was_typed():
    assert called() == {}
    given = called("-l", "007", "--names", "u", "--names", "v", "--quick", "--rule", "y")
    assert given == {"length": "007", "names": ["u", "v"], "fast": True, "rule": "y"}


@pytest.mark.parametrize("args", [("--kind", "c"), ("--rule", "z"), ("--internal", "4")])
def test_the_parser_refuses_other_choices_and_fields_without_an_option(args):
    assert called(*args).exit_code == 2


def test_settings_are_in_the_order_of_the_panels_with_their_defaults():
    found = {each.name: each.default for each in settings(Model)}
    assert found == {
        "names": "none", "kind": "a", "fast": "off", "rule": "none", "length": "5", "scale": "2",
    }  # fmt: skip


def test_the_model_is_not_imported_before_the_command_is_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "not_there", None)

    @command("not_there:Model")
    def work(given: dict[str, Any]) -> None:
        """Work."""

    with pytest.raises(ImportError):
        build(work)


def test_the_shell_completes_the_last_word_of_a_list():
    names = next(each for each in settings(Model) if each.name == "names")
    from specbench_cli.config.options import _completion

    assert names.option.complete is not None
    assert _completion(names.option.complete)("sps,") == ["sps,sps", "sps,pld"]
