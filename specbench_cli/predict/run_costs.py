"""Measured forward costs for the prediction of a run: from the run itself, or from the cache."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.measure.costs import Costs, CostSetup, find_cached
from specbench_cli.store.run_dir import COSTS, RunDir


def load_costs(run: RunDir) -> list[Costs]:
    """Load the costs that were probed between a run's prompts, one per repeat.

    If there are none, load the cached costs of the run's machine, models and set-up.

    Raises:
        EnvironmentFault: there are no such costs.
        UsageError: a file of costs is damaged.
    """
    if found := sorted(run.path.glob(COSTS.format("*"))):
        return [check_models(Costs.load(file), run) for file in found]
    machine, setup = run.manifest.get("machine", {}), _setup(run)
    kept = find_cached(machine.get("id"), _weights(run), setup, heads=head_labels(run.manifest))
    if kept is not None:
        return [kept]
    from specbench_cli.measure.machine import fingerprint  # torch takes a second to import

    probe = probe_command(run.manifest)
    labels = " and ".join(facts["label"] for facts in run.manifest.get("models", {}).values())
    wanted = f"the forward costs of {labels} ({setup}) were not measured on"
    if machine.get("id") == fingerprint()["id"]:
        raise EnvironmentFault(f"{wanted} this machine yet", probe)
    raise EnvironmentFault(
        f"{wanted} the machine of {run.path}, which is another machine than this one",
        f"run {probe} --out FILE on that machine, then here: specbench predict {run.path}"
        " --costs FILE",
    )


def probe_command(manifest: Mapping[str, Any], *more: str) -> str:
    """Return the command that measures the costs for a run.

    Args:
        more: further arguments of the command.
    """
    words = ["specbench", "predict", "--probe"]
    for role, facts in manifest.get("models", {}).items():
        words += [f"--{role}", str(facts["label"])]
    config = manifest.get("config", {}).get("effective", {})
    gpu = str(config.get("device", "")).startswith("cuda")
    for option in CostSetup.model_fields:
        if config.get(option) is not None and (gpu or option != "graphs"):
            words += [f"--{option}", str(config[option])]
    for file in config.get("plugins") or ():
        words += ["--plugin", file]
    return shlex.join([*words, *more])


def head_labels(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each head of a run, by its name in traces."""
    held = manifest.get("heads") or {}
    return {name.partition(" ")[0]: facts["sha256"] for name, facts in held.items()}


def check_models(costs: Costs, run: RunDir) -> Costs:
    """Return the costs. Raise UsageError if they were measured for other models than the run's."""
    if costs.covers_models(_weights(run)):
        return costs
    theirs = ", ".join(f"{role} {facts['label']}" for role, facts in costs.models.items())
    models = run.manifest.get("models", {})
    ours = ", ".join(f"{role} {facts['label']}" for role, facts in models.items())
    raise UsageError(
        f"the costs were measured for other models: {theirs}; {run.path} has {ours}. The hashes of"
        " the weights must be equal",
        probe_command(run.manifest),
    )


def find_difference(costs: Costs, run: RunDir) -> str | None:
    """Return how the machine and set-up of the costs differ from the run's; None if
    they are equal.
    """
    if costs.machine.get("id") != run.manifest.get("machine", {}).get("id"):
        return "another machine than the run was made on"
    setup = _setup(run)
    return None if costs.setup == setup else f"another set-up than the run's ({setup})"


def _weights(run: RunDir) -> dict[str, str]:
    return {role: facts["sha256"] for role, facts in run.manifest.get("models", {}).items()}


def _setup(run: RunDir) -> CostSetup:
    config = run.manifest.get("config", {}).get("effective", {})
    try:
        return CostSetup(
            device=config["device"],
            dtype=config["dtype"],
            threads=config["threads"],
            graphs=config.get("graphs", "off"),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{run.path} was not started: its manifest has no device, dtype and threads",
            f"specbench run --resume {run.path}",
        ) from error
