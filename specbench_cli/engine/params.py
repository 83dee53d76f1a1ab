"""Parameters of methods: their base, and types of parameters that several have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class MethodParams(BaseModel):
    """A method's parameters: a field each, with its default, bounds and description."""

    model_config = ConfigDict(frozen=True, extra="forbid")


AUTO: Literal["auto"] = "auto"
"""What pays best at what forwards cost here."""


def _number_or_auto(value: Any) -> Any:
    if value == AUTO or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be a whole number from 1, or {AUTO}; got {value!r}")


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
"""The type of such a parameter."""


def _listed(value: Any) -> Any:
    """ "3,2,1", as a command line has it, or a single number."""
    if isinstance(value, str):
        return value.split(",")
    return (value,) if isinstance(value, int) else value


Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), BeforeValidator(_listed)
]
"""The type of a parameter: children of a tree's nodes, level by level."""
