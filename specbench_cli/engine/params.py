"""Parameters of methods: their base, and those that are a whole number or "auto"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


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
