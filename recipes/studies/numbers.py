"""Parsing and formatting of large numbers such as `0.3M` and `500k`."""

from __future__ import annotations

_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}


def number(word: str) -> float:
    """Parse a number such as `0.3M`, `500k` or `3e5`. Raise ValueError if it is not a number."""
    word = word.strip()
    unit = _UNITS.get(word[-1:])
    return float(word) if unit is None else unit * float(word[:-1])


def short(value: float) -> str:
    """Return a number with three digits as text that `number` can parse."""
    for letter, unit in reversed(_UNITS.items()):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"
