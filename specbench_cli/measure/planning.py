"""The plan of a run, made in the order in which its parts depend on each other.

Without plug-ins and a memory budget nothing here imports torch.
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
    """A planned run.

    tuning: candidates of the tuning before the run; None if the run is not tuned.
    left_out: label -> reason for methods that cannot run here.
    memory: settings that the memory budget changed; None without a budget.
    """

    plan: Plan
    tuning: Tuning | None
    left_out: Mapping[str, str]
    memory: Mapping[str, Any] | None


def prepare_run(config: RunConfig, *, fetch: bool) -> PreparedRun:
    """Plan a new run. Add missing controls, and remove methods that cannot run here.

    Args:
        fetch: Download heads that are not on this machine.
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
    """Return the plan of a run that is not started, and its facts.

    The facts include the methods that cannot run here.
    """
    made = prepare_run(config, fetch=False)
    beside = {"left_out": left_out_notes(made.left_out), "memory_budget": made.memory}
    told = plan_facts(made.plan, made.tuning)
    return made.plan, {**told, **{name: each for name, each in beside.items() if each}}


def plan_run(config: RunConfig) -> tuple[Plan, Tuning | None]:
    """Return the plan of a run, and of the tuning before it if it is tuned; see `make_plan`."""
    _check_plugins(config)
    plan = make_plan(config)
    return (plan, None) if config.tune is None else tune.prepare(plan)


def _check_plugins(config: RunConfig) -> None:
    """Plan the methods of plug-ins in processes of their own first, if there are plug-ins."""
    if config.plugins or any(row.name not in registry.built_in_methods() for row in config.methods):
        from specbench_cli.measure.isolation.plugin_process import check_plugins

        check_plugins(config)


def plan_facts(plan: Plan, tuning: Tuning | None) -> dict[str, Any]:
    """Return the plan for a person or a program to read."""
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
    """Return a note for each method that cannot run here."""
    return [f"{label} is left out, it cannot run here: {why}" for label, why in left_out.items()]
