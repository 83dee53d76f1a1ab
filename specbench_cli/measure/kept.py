"""Where costs are kept between a probe and its use: in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench_cli.errors import UsageError
from specbench_cli.files import cache_folder
from specbench_cli.measure.costs import Costs, Setup


def kept_at(machine_id: str, models: Mapping[str, Mapping[str, Any]], setup: Setup) -> Path:
    """The file of a probe's costs: one a machine, models and set-up."""
    key = {
        "machine": machine_id,
        "models": {role: facts["sha256"] for role, facts in models.items()},
        **setup.model_dump(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return _folder() / f"{digest[:16]}.json"


def find(
    machine_id: str | None,
    models: Mapping[str, str],
    setup: Setup,
    *,
    heads: Mapping[str, str] | None = None,
) -> Costs | None:
    """The newest costs kept of a machine and a set-up that know certain models.

    Args:
        models: role -> sha256 of the weights.
        heads: the same of models that they had better know too: those that know most count.
    """
    fitting = []
    for path in _folder().glob("*.json"):
        try:
            costs = Costs.load(path)
        except UsageError:
            continue  # a newer program's, or damaged: as good as not there
        if costs.machine.get("id") == machine_id and costs.setup == setup and costs.knows(models):
            fitting.append(costs)
    wanted = (heads or {}).items()

    def rank(costs: Costs) -> tuple[int, str]:
        return sum(costs.knows(dict([head])) for head in wanted), costs.created_utc

    return max(fitting, key=rank, default=None)


def _folder() -> Path:
    return cache_folder() / "costs"
