"""Settings of contrastive decoding (USCD), for the option `--contrast`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEFAULTS = {"beta": 0.5, "keep": 0.5, "below": 0.45, "floor": 0.1}
"""Default values, which were chosen by specbench. The paper has other constants."""

LIMITS = {"beta": (0.0, 10.0), "keep": (0.0, 1.0), "below": (0.0, 1.0), "floor": (0.0, 1.0)}
"""Minimum and maximum of each setting."""

SYNTAX = "beta=0.5,keep=0.5,below=0.45,floor=0.1, or some of these keys"
"""Syntax of `--contrast`, for errors."""


def parse_contrast(value: Any) -> Any:
    """Return all settings of contrastive decoding. Missing settings get their defaults.

    Args:
        value: a text `KEY=VALUE,KEY=VALUE`, a mapping of keys to values, or None.

    Raises:
        ValueError: The type, a key or a value is not allowed. The message names what is allowed.
    """
    if value is None:
        return None
    pairs = _split_pairs(value) if isinstance(value, str) else value
    if not isinstance(pairs, Mapping) or not pairs:
        raise ValueError(f"must be {SYNTAX}, got {value!r}")
    for key in pairs:
        if key not in DEFAULTS:
            raise ValueError(f"has unknown key {str(key)!r}; use {SYNTAX}")
    return {key: _parse_number(key, pairs.get(key, usual)) for key, usual in DEFAULTS.items()}


def _split_pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"must be {SYNTAX}, got {text!r}")
        if key in found:
            raise ValueError(f"has {key} twice; must be {SYNTAX}")
        found[key] = value
    return found


def _parse_number(key: str, value: Any) -> float:
    least, most = LIMITS[key]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise ValueError(f"has {key}={value}; must be a number from {least:g} to {most:g}")
    return number
