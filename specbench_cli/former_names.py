"""Former names that older plug-ins, runs, baselines and certificates still use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

DRAW_MODES = {
    "point": "deterministic",
    "iid": "independent",
    "wor": "without_replacement",
}
"""Former value of `Draft.law` -> value of `Draft.draw_mode`."""

CHECKS = {"law": "distribution"}
"""Former name of an audit's check -> its name."""


def current_draw_mode(mode: str) -> str:
    """Return a draw mode by its current name, and warn if it was given by a former one."""
    if mode not in DRAW_MODES:
        return mode
    current = DRAW_MODES[mode]
    warnings.warn(
        f"`law={mode!r}` of a draft is now `draw_mode={current!r}`", DeprecationWarning, 4
    )
    return current


def current_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's parameters by their current names: `law=wor` was a draw mode."""
    if params.get("law") not in DRAW_MODES:
        return dict(params)
    return {
        "draw_mode" if name == "law" else name: DRAW_MODES[value] if name == "law" else value
        for name, value in params.items()
    }
