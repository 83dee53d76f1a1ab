"""Sweeps: one method measured with several values of its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import product
from math import prod
from typing import Any

from specbench_cli.config.document import parse_scalar
from specbench_cli.config.problems import first_duplicate, shorten

MAX_ROWS = 64
"""Maximum number of methods in a run with a sweep."""

MAX_NUMBER = 1e15
"""Maximum number in a range. Floats cannot represent every integer above it."""
SYNTAX = "a range a:b:step with both ends included, or values separated by commas"
"""Syntax of swept values, for errors."""

_RANGE = re.compile(r"[-+.\deE]*(:[-+.\deE]*)+")


def parse_values(text: str) -> list[Any]:
    """Parse the values of a sweep, e.g. `1:6:1`, `0.1:0.9:0.2`, `3,5,heuristic` or `1:4:1,8,16`.

    `1:6:1` is a range: first value, last value and step. Values that contain commas are separated
    by
    semicolons: `3,2,1;4,2`.

    Raises:
        ValueError: The text has no values, too many values, or an invalid range. The message
            describes the syntax.
    """
    found: list[Any] = []
    for word in (word.strip() for word in text.split(";" if ";" in text else ",")):
        if not word:
            raise ValueError(f"must be {SYNTAX}, got {text!r}")
        found += _parse_range(word) if _RANGE.fullmatch(word) else [parse_scalar(word)]
    return check_distinct(found)


def check_distinct(found: Sequence[Any]) -> list[Any]:
    """Return the values of a sweep as a list.

    Raises:
        ValueError: There is no value, or a value occurs twice.
    """
    if not found:
        raise ValueError(f"must be {SYNTAX}, got nothing")
    if (twice := first_duplicate(format_value(value) for value in found)) is not None:
        raise ValueError(f"has {shorten(twice)} twice")
    return list(found)


def _parse_range(text: str) -> list[Any]:
    first, last, step = _parse_bounds(text)
    if step == 0:
        raise ValueError(f"has step 0 in {text}; use another step")
    if (last - first) * step < 0:
        turned = f"{last}:{first}:{step} or {first}:{last}:{-step}"
        raise ValueError(f"has no values: {text} has a step in the wrong direction; use {turned}")
    count = int((last - first) // step) + 1
    if count > MAX_ROWS:
        raise ValueError(f"has {count} values in {shorten(text)}, at most {MAX_ROWS} are allowed")
    whole = first == first.to_integral_value() and step == step.to_integral_value()
    kind = int if whole else float
    return [kind(first + place * step) for place in range(count)]


def _parse_bounds(text: str) -> tuple[Decimal, Decimal, Decimal]:
    """Parse a range `FIRST:LAST:STEP` into its three numbers.

    Raises:
        ValueError: The text is not a range, or its numbers have too many digits to compute exactly.
    """
    try:
        first, last, step = (Decimal(word) for word in text.split(":"))
        fits = all(abs(each) < MAX_NUMBER for each in (first, last, step))  # raises for NaN
        if step and fits:
            (last - first) // step
    except (ArithmeticError, ValueError) as fault:
        raise ValueError(f"must be {SYNTAX}, got {shorten(repr(text))}") from fault
    if not fits:
        raise ValueError(
            f"must be {SYNTAX}, of numbers below {MAX_NUMBER:g}, got {shorten(repr(text))}"
        )
    return first, last, step


def expand_method(
    row: Mapping[str, Any], swept: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return one configuration of a method for each combination of its swept values.

    The values are appended to the method's label, e.g. `sps length=3`.
    """
    label = row.get("label") or row["name"]
    return [
        {
            **row,
            "label": " ".join([label, *format_params(point)]),
            "params": {**row.get("params", {}), **point},
        }
        for point in list_combinations(swept)
    ]


def list_combinations(swept: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of swept values. The last parameter changes fastest."""
    return [dict(zip(swept, chosen, strict=True)) for chosen in product(*swept.values())]


def count_combinations(swept: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of combinations of swept values."""
    return prod(len(found) for found in swept.values())


def format_params(params: Mapping[str, Any]) -> list[str]:
    """Return parameters as the user would type them, e.g. `length=3`."""
    return [f"{name}={format_value(value)}" for name, value in params.items()]


def format_value(value: Any) -> str:
    """Return a parameter's value as the user would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace("\n", "\\n")
