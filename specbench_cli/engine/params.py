"""Base class and types of method parameters, and the speedups that a method's sources claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from specbench_cli.former_names import current_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Speedup that the paper or project of a method reports, with the experiment's setup.

    Attributes:
        speedup: Speedup over plain decoding, as the source prints it: "2.90x", "up to 6.5x".
        models, task, hardware: Setup of the experiment. Empty if the source does not state it.
        temperature: Sampling temperature. None if the source does not state it.
        source: Place where the claim is printed, such as "abstract of arXiv:2503.01840".
    """

    speedup: str
    models: str = ""
    task: str = ""
    temperature: float | None = None
    hardware: str = ""
    source: str


class MethodParams(BaseModel):
    """Base class of a method's parameters. Each is a pydantic field with default, bounds and
    description.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, values: Any) -> Any:
        has_draw_mode = isinstance(values, dict) and "draw_mode" in cls.model_fields
        return current_params(values) if has_draw_mode else values


AUTO: Literal["auto"] = "auto"
"""Parameter value: use the best value for the measured forward costs."""


def _number_or_auto(value: Any) -> Any:
    if value == AUTO or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be a whole number from 1, or {AUTO}; got {value!r}")


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
"""Type of a parameter that is a whole number or `AUTO`."""


def _split_widths(value: Any) -> Any:
    """Split a string such as "3,2,1" from the command line. Also accept a single number."""
    if isinstance(value, str):
        return value.split(",")
    return (value,) if isinstance(value, int) else value


Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), BeforeValidator(_split_widths)
]
"""Type of a parameter: number of children of a tree's nodes, level by level."""


def _split_words(value: Any) -> Any:
    """Split a string such as "wait,hold on" from the command line. An empty string has no words."""
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


WordList = Annotated[tuple[str, ...], BeforeValidator(_split_words)]
"""Type of a parameter: a list of words."""
