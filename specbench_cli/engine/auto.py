"""Parameters that are a whole number, or "auto": what pays best at what forwards cost here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

AUTO: Literal["auto"] = "auto"


def _number_or_auto(value: Any) -> Any:
    if value == AUTO or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be a whole number from 1, or {AUTO}; got {value!r}")


NumberOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
"""The type of such a parameter."""
