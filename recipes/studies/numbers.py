"""Large numbers as they are typed and shown: `0.3M`, `500k`."""

from __future__ import annotations

_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}


def number(word: str) -> float:
    """A number as typed: `0.3M`, `500k`, `3e5`. Raises ValueError where it is none."""
    word = word.strip()
    unit = _UNITS.get(word[-1:])
    return float(word) if unit is None else unit * float(word[:-1])


def short(value: float) -> str:
    """A number in three digits, as `number` takes it."""
    for letter, unit in reversed(_UNITS.items()):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"
