"""Planning of a run: check plug-ins, choose methods and settings that work here, plan tuning.

Importing torch takes a second. So this module imports torch only for plug-ins and memory
budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench_cli import registry
from specbench_cli.config.run import RunConfig
from specbench_cli.plan import tune
from specbench_cli.plan.controls import add_controls
from specbench_cli.plan.plan import Plan, drop_unavailable, make_plan
from specbench_cli.plan.tune import Tuning


@dataclass(frozen=True)
class PreparedRun:
    """Plan of a new run.

    tuning: Plan of the tuning, which chooses parameters before the run. None without --tune.
    left_out: Methods that cannot run on this machine -> the reason.
    memory: Manifest entry of the memory budget. None without --memory-budget.
    """

    plan: Plan
    tuning: Tuning | None
    left_out: Mapping[str, str]
    memory: Mapping[str, Any] | None


def prepare_run(config: RunConfig, *, fetch: bool) -> PreparedRun:
    """Plan a new run.

    Add controls, which are methods to compare lossy methods with. Leave out methods that cannot run
    on this machine.

    Args:
        config: Configuration of the run.
        fetch: True downloads draft heads that are not on this machine.
    """
    _check_plugins(config)
    config, left_out = drop_unavailable(config, fetch=fetch)
    config = add_controls(config)
    memory = None
    if config.memory_budget is not None:
        from specbench_cli.measure.memory_budget import fit_to_budget

        config, memory = fit_to_budget(config)
    return PreparedRun(*plan_run(config), left_out, memory)


def plan_dry_run(config: RunConfig) -> tuple[Plan, dict[str, Any]]:
    """Return the plan for `--dry-run`, which displays a run and does not start it.

    Also return facts to display. Nothing is downloaded.
    """
    prepared = prepare_run(config, fetch=False)
    facts = plan_facts(prepared.plan, prepared.tuning)
    if prepared.left_out:
        facts["left_out"] = left_out_notes(prepared.left_out)
    if prepared.memory:
        facts["memory_budget"] = prepared.memory
    return prepared.plan, facts


def plan_run(config: RunConfig) -> tuple[Plan, Tuning | None]:
    """Return the plan of a run, and the plan of its tuning.

    The tuning plan is None without --tune.
    """
    _check_plugins(config)
    plan = make_plan(config)
    return (plan, None) if config.tune is None else tune.prepare(plan)


def _check_plugins(config: RunConfig) -> None:
    """Import plug-ins in plug-in processes, to check them before the main process imports them."""
    if config.plugins or any(row.name not in registry.built_in_methods() for row in config.methods):
        from specbench_cli.measure.isolation.plugin_process import check_plugins

        check_plugins(config)


def plan_facts(plan: Plan, tuning: Tuning | None) -> dict[str, Any]:
    """Return facts about a plan, for display and for JSON output."""
    if tuning is None:
        return plan.facts()
    return {
        **plan.facts(),
        "tuning": {
            "by": plan.config.tune_by,
            "development": len(tuning.development),
            "held_out": len(plan.questions),
            "candidates": {row: len(method_runs) for row, method_runs in tuning.rows.items()},
            "cells": tune.tuning_plan(plan, tuning).n_outputs,
        },
    }


def left_out_notes(left_out: Mapping[str, str]) -> list[str]:
    """Return a note to the user for each method that cannot run on this machine.

    Args:
        left_out: Label of the method -> the reason.
    """
    return [f"{label} is left out, it cannot run here: {why}" for label, why in left_out.items()]
