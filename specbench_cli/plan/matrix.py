"""Several targets, and several drafts of each: a run of each pair, with a vanilla of its own.

Nothing that is measured on one target is divided by what was measured on another, so a pair needs
nothing of the others: it is an ordinary run, that is resumed, reported and compared as any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from specbench_cli import registry
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError

MAX_PAIRS = 32
"""Pairs of a matrix: more are a mistake, or several commands."""


def is_matrix(config: RunConfig) -> bool:
    """Whether a configuration stands for several runs."""
    return bool(config.targets or config.drafts)


def pairs(config: RunConfig) -> dict[str, RunConfig]:
    """The runs that a configuration stands for, by their folders' names: `embedded-7m`, or
    `embedded-7m+embedded-1m` where drafts are named.

    Rows that use no draft model are measured once a target, with its first draft.

    Raises:
        UsageError: drafts are named and no row uses one; or there are more than `MAX_PAIRS` pairs.
    """
    targets = config.targets or [config.target]
    drafts: Sequence[str | None] = config.drafts or [None]
    if len(targets) * len(drafts) > MAX_PAIRS:
        raise UsageError(
            f"{len(targets)} targets and {len(drafts)} drafts are {len(targets) * len(drafts)}"
            f" runs, and one command makes {MAX_PAIRS} at most",
            "name fewer, or share them out over several commands",
        )
    drafted = [row for row in config.methods if _uses_draft(row.name, row.params)]
    if config.drafts and not drafted:
        rows = ", ".join(row.label for row in config.methods)
        raise UsageError(
            f"--drafts {','.join(config.drafts)} is for methods with a draft model, and none of"
            f" them is run ({rows})",
            "add --method sps, or leave --drafts out",
        )
    found: dict[str, RunConfig] = {}
    for target, (place, draft) in product(targets, enumerate(drafts)):
        own: dict[str, Any] = {"targets": [], "drafts": [], "target": target}
        if draft is not None:
            own["draft"] = draft
        if place:
            vanilla = [row for row in config.methods if row.name == "vanilla"]
            own["methods"] = [*vanilla, *drafted]
        name = "+".join(map(_folder_name, (target, draft) if draft is not None else (target,)))
        if name in found:
            name = f"{name}-{len(found) + 1}"
        found[name] = config.model_copy(update=own)
    return found


def _uses_draft(name: str, params: Mapping[str, Any]) -> bool:
    return "draft" in registry.declare(name, params).requirements


def _folder_name(model: str) -> str:
    """A model's name, as a folder may have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"
