"""What is written of a run before anything is measured: the first state of its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import specbench_cli
from specbench_cli import __version__
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import on_one_line
from specbench_cli.measure import environment
from specbench_cli.measure.machine import fingerprint, machine_id
from specbench_cli.measure.shown import shown
from specbench_cli.plan.controls import is_control
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
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
        "method_files": {
            method_run.name: method_run.file_sha256 for method_run in plan.method_runs
        },
        "program": program(plan),
        "mixed": [],
        "dropped": {},
        "upper_bounds": [
            method_run.label for method_run in plan.method_runs if method_run.method.upper_bound
        ],
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
        "synthetic": plan.synthetic,
        "grammar": None if plan.grammar is None else plan.grammar.facts(),
        "containment": _containment(plan.config),
        "noisy": False,
        "tolerance": None,
        "near_ties": None,
        "leaks": {},
        "aa_noise": None,
    }


def program(plan: Plan) -> dict[str, str]:
    """What must be the same when a run is resumed, but for weights, which the manifest has apart:
    a word for each thing, checksums cut to 12 digits. Where others measure, what is said of the
    machine is theirs (`placed`)."""
    packages = {name: str(version) for name, version in environment.versions().items()}
    settings = public(plan)
    return {
        **packages,
        "specbench": __version__,
        "specbench's source": _source(),
        "schema": str(SCHEMA),
        **(placed() if plan.config.executor == "local" else {}),
        **{
            f"the file of {method_run.name}": method_run.file_sha256[:12]
            for method_run in plan.method_runs
        },
        **{f"the data of task {task.name}": task.sha256[:12] for task in plan.tasks},
        "the questions": _digest(question.prompt_id for question in plan.questions),
        **({} if plan.grammar is None else {"the grammar's library": plan.grammar.library}),
        **{f"setting {name}": json.dumps(settings[name]) for name in sorted(settings)},
    }


def placed() -> dict[str, str]:
    """What must be the same wherever a run is measured."""
    variables = {f"variable {name}": value for name, value in environment.variables().items()}
    return {"machine": machine_id(), **variables}


def is_placed(key: str) -> bool:
    """Whether a word of `program` is one of `placed`."""
    return key == "machine" or key.startswith("variable ")


@cache
def _source() -> str:
    """Checksum of our own code."""
    home = Path(specbench_cli.__file__).parents[1]
    files = (file for name in ("specbench_cli", "methods") for file in (home / name).rglob("*.py"))
    return _digest(file.read_text(encoding="utf-8") for file in sorted(files))


def _digest(texts: Iterable[str]) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()[:12]


def rows(plan: Plan) -> list[dict[str, Any]]:
    """Every row with its parameters and where they come from.

    timing_free: whether its counters are a function of inputs and seed alone. uses: the models and
    heads that it drafts with: a model as `models` names it, a head by its kind. state_scope: how
    long what it learns lives, with these parameters ("prompt", "run", "corpus"). accept: the rule
    that lets draft tokens pass though the lossless one rejects them; null where none does.
    workers: how many compute at once.
    baseline: the label of the row that its speedups are over, whether that was run or not. control:
    whether it is there for lossy rows to be held against.
    """
    return [
        {
            "label": method_run.label,
            "method": method_run.name,
            "params": shown(method_run.method.params.model_dump(mode="json")),
            "source": method_run.source,
            "timing_free": method_run.method.timing_free,
            "state_scope": method_run.method.scope,
            "uses": _uses(plan, method_run),
            "accept": _accepts(method_run),
            "workers": method_run.method.workers,
            "baseline": plan.baseline(method_run),
            "control": is_control(method_run.method),
        }
        for method_run in plan.method_runs
    ]


def _containment(config: RunConfig) -> str | None:
    """What answers' code was run in; None where none was."""
    if not config.run_code:
        return None
    return "limits" if config.uncontained else "namespaces"


def _accepts(method_run: MethodRun) -> str | None:
    rule = method_run.method.accept
    return None if rule is None or rule.is_exact else on_one_line(str(rule))


def _uses(plan: Plan, method_run: MethodRun) -> list[str]:
    draft = ["draft"] if "draft" in method_run.method.requirements else []
    others = [plan.others[name].label for name in method_run.method.models()]
    return [*draft, *others, *(wanted.kind.kind for wanted in method_run.method.artifacts())]


def public(plan: Plan) -> dict[str, Any]:
    """The configuration with names in place of paths."""
    return {
        **shown(plan.config.model_dump(mode="json")),
        "target": plan.target.label,
        "draft": plan.draft.label if plan.draft else None,
        "grammar": None if plan.grammar is None else str(plan.grammar),
        "tasks": [task.name for task in plan.tasks],
        "plugins": [Path(path).name for path in plan.config.plugins],
    }


def now() -> str:
    """The time, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
