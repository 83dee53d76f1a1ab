"""Matrix: one run for each pair of a target and a draft model (`--targets`, `--drafts`).

Each pair is an ordinary run with its own vanilla outputs. So it can be resumed, reported and
compared like any other run.
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
"""Maximum number of pairs in a matrix."""


def is_matrix(config: RunConfig) -> bool:
    """Return True if the settings describe a matrix of runs."""
    return bool(config.targets or config.drafts)


def expand_matrix(config: RunConfig) -> dict[str, RunConfig]:
    """Return the settings of each run of a matrix, by the name of the run's folder.

    A name is, for example, `embedded-7m`. If draft models are given, it is
    `embedded-7m+embedded-1m`. Methods without a draft model are measured only in the first run of
    each target.

    Raises:
        UsageError: draft models are given but no method uses a draft model. Or there are more than
            `MAX_PAIRS` pairs.
    """
    targets = config.targets or [config.target]
    drafts: Sequence[str | None] = config.drafts or [None]
    if len(targets) * len(drafts) > MAX_PAIRS:
        raise UsageError(
            f"{len(targets)} targets and {len(drafts)} drafts are {len(targets) * len(drafts)}"
            f" runs, at most {MAX_PAIRS} are allowed",
            "give fewer models, or use several commands",
        )
    drafted = [row for row in config.methods if _uses_draft(row.name, row.params)]
    if config.drafts and not drafted:
        rows = ", ".join(row.label for row in config.methods)
        raise UsageError(
            f"--drafts {','.join(config.drafts)} needs a method with a draft model, and the run has"
            f" none ({rows})",
            "add --method sps, or omit --drafts",
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
    """Return the name of a model, changed so that it is a valid folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"
