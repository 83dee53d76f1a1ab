"""Formats of numbers in tables."""

from __future__ import annotations

NONE = "-"
"""Cell of a missing value."""


def ratio(value: float | None) -> str:
    """Format a speedup."""
    return NONE if value is None else f"{value:.2f}x"


def bounds(low: float | None, high: float | None) -> str:
    """Format an interval."""
    return NONE if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number."""
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Format a share or a rate."""
    return NONE if value is None else f"{value:.{digits}%}"


def points(mean: float | None, low: float | None, high: float | None) -> str:
    """Format a difference in accuracy in percentage points, with its interval."""
    if mean is None:
        return NONE
    between = "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * mean:+.1f}{between}"


def text_or_none(value: str | None) -> str:
    """Format a text that may be missing or empty."""
    return value or NONE
