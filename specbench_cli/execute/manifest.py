"""What is written of a run before anything is measured: the first state of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench_cli import __version__
from specbench_cli.execute.plan import Arm, Plan
from specbench_cli.execute.shown import shown
from specbench_cli.measure.machine import fingerprint
from specbench_cli.store.schema import SCHEMA


def manifest(plan: Plan, sources: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a run that has not begun.

    Args:
        sources: where each value of the configuration came from.
    """
    return {
        "schema": SCHEMA,
        "version": __version__,
        "created_utc": now(),
        "config": {"effective": public(plan)},
        "config_sources": {key: Path(source).name for key, source in sources.items()},
        "machine": fingerprint(),
        "models": {},
        "heads": {},
        "rows": rows(plan),
        "tuning": None,
        "method_files": {arm.name: arm.file_sha256 for arm in plan.arms},
        "upper_bounds": [arm.label for arm in plan.arms if arm.method.upper_bound],
        "tasks": [
            {
                "name": task.name,
                "version": task.version,
                "sha256": task.sha256,
                "n_questions": sum(q.task == task.name for q in plan.questions),
                "embedded": task.embedded,
            }
            for task in plan.tasks
        ],
        "noisy": False,
        "tolerance": None,
        "near_ties": None,
        "leaks": {},
        "aa_noise": None,
    }


def rows(plan: Plan) -> list[dict[str, Any]]:
    """Every row with its parameters and where they come from.

    timing_free: whether its counters are a function of inputs and seed alone. uses: the models and
    heads that it drafts with: a model as `models` names it, a head by its kind. state_scope: how
    long what it learns lives, with these parameters ("prompt", "run", "corpus"). accept: the rule
    that lets draft tokens pass though the lossless one rejects them; null where none does.
    """
    return [
        {
            "label": arm.label,
            "method": arm.name,
            "params": shown(arm.method.params.model_dump(mode="json")),
            "source": arm.source,
            "timing_free": arm.method.timing_free,
            "state_scope": arm.method.scope,
            "uses": _uses(plan, arm),
            "accept": _accepts(arm),
        }
        for arm in plan.arms
    ]


def _accepts(arm: Arm) -> str | None:
    rule = arm.method.accept
    return None if rule is None or rule.off else str(rule)


def _uses(plan: Plan, arm: Arm) -> list[str]:
    draft = ["draft"] if "draft" in arm.method.needed else []
    others = [plan.others[name].label for name in arm.method.models()]
    return [*draft, *others, *(wanted.kind.kind for wanted in arm.method.artifacts())]


def public(plan: Plan) -> dict[str, Any]:
    """The configuration with names in place of paths."""
    return {
        **shown(plan.config.model_dump(mode="json")),
        "target": plan.target.label,
        "draft": plan.draft.label if plan.draft else None,
        "tasks": [task.name for task in plan.tasks],
        "plugins": [Path(path).name for path in plan.config.plugins],
    }


def now() -> str:
    """The time, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
