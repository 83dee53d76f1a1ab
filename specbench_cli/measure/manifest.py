"""Manifest of a new run: its settings, methods, tasks, software and machine.

The manifest is a JSON file in the run's folder. It gets further entries while the run measures.
"""

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
from specbench_cli.errors import to_one_line
from specbench_cli.measure import environment
from specbench_cli.measure.machine import fingerprint, machine_id
from specbench_cli.measure.redaction import redact_setting
from specbench_cli.plan.controls import is_control
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.schema import SCHEMA


def build_manifest(plan: Plan, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a new run.

    Args:
        plan: Plan of the run.
        sources: Name of each setting -> origin of its value, such as "command line" or a file
            name.
    """
    return {
        "schema": SCHEMA,
        "version": __version__,
        "created_utc": utc_now(),
        "config": {"effective": effective_config(plan)},
        "config_sources": {key: Path(source).name for key, source in sources.items()},
        "machine": fingerprint(),
        "models": {},
        "heads": {},
        "rows": method_entries(plan),
        "tuning": None,
        "method_files": {
            method_run.name: method_run.file_sha256 for method_run in plan.method_runs
        },
        "program": program_facts(plan),
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


def program_facts(plan: Plan) -> dict[str, str]:
    """Return the facts that must not change when a run is resumed: name -> value.

    The facts are versions, settings, the machine, and checksums (12 digits) of files and data. The
    weights are checked separately (`run_checks.check_weights`). If cluster workers measure the run,
    the facts of this machine are not included. The workers' machines are checked instead
    (`machine_facts`).
    """
    packages = {name: str(version) for name, version in environment.versions().items()}
    settings = effective_config(plan)
    return {
        **packages,
        "specbench": __version__,
        "specbench's source": _source_checksum(),
        "schema": str(SCHEMA),
        **(machine_facts() if plan.config.executor == "local" else {}),
        **{
            f"the file of {method_run.name}": method_run.file_sha256[:12]
            for method_run in plan.method_runs
        },
        **{f"the data of task {task.name}": task.sha256[:12] for task in plan.tasks},
        "the questions": _digest(question.prompt_id for question in plan.questions),
        **({} if plan.grammar is None else {"the grammar's library": plan.grammar.library}),
        **{f"setting {name}": json.dumps(settings[name]) for name in sorted(settings)},
    }


def machine_facts() -> dict[str, str]:
    """Return hardware and environment variables.

    All machines of a cluster run must have the same.
    """
    variables = {f"variable {name}": value for name, value in environment.variables().items()}
    return {"machine": machine_id(), **variables}


def is_machine_key(key: str) -> bool:
    """Return True if a key in the result of `program_facts` comes from `machine_facts`."""
    return key == "machine" or key.startswith("variable ")


@cache
def _source_checksum() -> str:
    """Return a checksum of the source code of specbench."""
    home = Path(specbench_cli.__file__).parents[1]
    files = (file for name in ("specbench_cli", "methods") for file in (home / name).rglob("*.py"))
    return _digest(file.read_text(encoding="utf-8") for file in sorted(files))


def _digest(texts: Iterable[str]) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()[:12]


def method_entries(plan: Plan) -> list[dict[str, Any]]:
    """Return the manifest entry of each method.

    Some keys of an entry are:

    source: Origin of the method's parameters, such as "paper" or "default".
    timing_free: True if the method's step counters depend only on inputs and seed, not on timing.
    uses: Names of the method's models, and kinds of its heads.
    state_scope: How long the method keeps learned data: for a "prompt", a "run" or a "corpus".
    accept: Lossy accept rule, which accepts some tokens that the lossless rule rejects. None if the
        method is lossless.
    workers: Number of workers that compute in parallel.
    baseline: Label of the method to which the method's speedups are relative. The run may not
        contain this baseline.
    control: True if the method only serves as a comparison for lossy methods.
    """
    return [
        {
            "label": method_run.label,
            "method": method_run.name,
            "params": redact_setting(method_run.method.params.model_dump(mode="json")),
            "source": method_run.source,
            "timing_free": method_run.method.timing_free,
            "state_scope": method_run.method.scope,
            "uses": _used_models(plan, method_run),
            "accept": _accept_rule_text(method_run),
            "workers": method_run.method.workers,
            "baseline": plan.baseline(method_run),
            "control": is_control(method_run.method),
        }
        for method_run in plan.method_runs
    ]


def _containment(config: RunConfig) -> str | None:
    """Return how the run isolates the generated code that it executes.

    Return None if the run executes no generated code.
    """
    if not config.run_code:
        return None
    return "limits" if config.uncontained else "namespaces"


def _accept_rule_text(method_run: MethodRun) -> str | None:
    rule = method_run.method.accept
    return None if rule is None or rule.is_exact else to_one_line(str(rule))


def _used_models(plan: Plan, method_run: MethodRun) -> list[str]:
    draft = ["draft"] if "draft" in method_run.method.requirements else []
    others = [plan.others[name].label for name in method_run.method.models()]
    return [*draft, *others, *(wanted.kind.kind for wanted in method_run.method.artifacts())]


def effective_config(plan: Plan) -> dict[str, Any]:
    """Return the configuration of a run. Paths are replaced by names, to keep them private."""
    return {
        **redact_setting(plan.config.model_dump(mode="json")),
        "target": plan.target.label,
        "draft": plan.draft.label if plan.draft else None,
        "grammar": None if plan.grammar is None else str(plan.grammar),
        "tasks": [task.name for task in plan.tasks],
        "plugins": [Path(path).name for path in plan.config.plugins],
    }


def utc_now() -> str:
    """Return the current time in UTC, in ISO format with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
