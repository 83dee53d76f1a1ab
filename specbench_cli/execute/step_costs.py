"""What forwards cost, for a run's methods that choose by it: the same to the run's end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from specbench_cli import __version__
from specbench_cli.execute.bench import Bench
from specbench_cli.execute.planning.plan import Plan
from specbench_cli.execute.window import Windows
from specbench_cli.measure.costs import Setup
from specbench_cli.measure.kept import find
from specbench_cli.measure.quiet import QuietMeter
from specbench_cli.measure.step_costs import StepCosts, of_kept, quick
from specbench_cli.store.run_dir import RunDir


def provide_costs(plan: Plan, bench: Bench, run_dir: RunDir) -> None:
    """Let a run's methods know what forwards cost, if one of them asks.

    They are those that the manifest holds since the run began. Until then: those of the probe kept
    of this machine, these models, this set-up and software, if it was quiet and no method goes by
    the load; else they are measured now, whole steps of several sequences too where a method does.
    """
    if not any(arm.method.uses_costs for arm in plan.arms):
        return
    by_load = any(arm.method.by_load for arm in plan.arms)
    held = run_dir.manifest.get("step_costs")
    if held:
        costs = StepCosts.model_validate(held)
    else:
        kept = None if by_load else _kept(plan, bench, run_dir.manifest["machine"])
        costs = kept or quick(
            bench.workspace,
            Windows(QuietMeter(), allow_noise=True),
            bench.context,
            most=plan.config.batch if by_load else 0,
            sampling=plan.sampling,
        )
        run_dir.update(step_costs=costs.model_dump(mode="json"))
    bench.workspace.costs = cache(costs)


def _kept(plan: Plan, bench: Bench, machine: Mapping[str, Any]) -> StepCosts | None:
    """Those of a kept probe that a run of now can go by."""
    facts = bench.models() | bench.drafting_heads()
    models = {name: each["sha256"] for name, each in facts.items()}
    setup = Setup(dtype=plan.config.dtype, **bench.resolved())
    found = find(machine["id"], models, setup)
    if found is None or found.quietness.noisy:
        return None
    then = found.version, found.machine.get("versions")
    return of_kept(found) if then == (__version__, machine["versions"]) else None
