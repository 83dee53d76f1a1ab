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

API = {
    "Candidates": "CandidateNodes",
    "Chosen": "SelectedNodes",
    "Desk": "DraftSession",
    "Fixed": "FixedLength",
    "Grown": "GrownTree",
    "Layer": "LayerWeights",
    "Said": "LevelOutput",
    "Template": "TreeTemplate",
    "Trained": "ArtifactSpec",
    "Windows": "DraftWindows",
    "drawn_at_once": "draw_chain",
    "guesses": "guess_outcomes",
    "most": "max_nodes",
    "rule_of": "create_length_rule",
    "said_ids": "read_output_ids",
    "size_of": "create_size_rule",
    "spread": "scatter_logits",
    "told_ids": "output_id_tensors",
}
"""Former name in `specbench_cli.api` -> name."""


def api_member(members: Mapping[str, Any], name: str) -> Any:
    """Return a member of `specbench_cli.api` by its former name, and warn.

    Raises:
        AttributeError: no member had this name.
    """
    if name not in API:
        raise AttributeError(f"module 'specbench_cli.api' has no attribute {name!r}")
    warnings.warn(f"`{name}` is now `{API[name]}`", DeprecationWarning, 3)
    return members[API[name]]


class FormerName:
    """A former name of a member of a class: reading it warns and returns the current member."""

    def __init__(self, current: str) -> None:
        self._current = current

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        warnings.warn(
            f"`{owner.__name__}.{self._name}` is now `{self._current}`", DeprecationWarning, 2
        )
        return getattr(owner if instance is None else instance, self._current)


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
