"""Measurement of a repeat in the current process: load models, measure, and store the results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.errors import SpecbenchError, UsageError, WorkerLost
from specbench_cli.measure.machine_lock import get_machine_lock
from specbench_cli.measure.manifest import method_entries
from specbench_cli.measure.planning import left_out_notes
from specbench_cli.measure.redaction import redact_paths
from specbench_cli.measure.repeat_process import TUNING, resume_command
from specbench_cli.measure.run_checks import check_weights
from specbench_cli.measure.view import RunView
from specbench_cli.plan.plan import Plan, format_reason
from specbench_cli.store.run_dir import COSTS, RunDir
from specbench_cli.store.schema import BASELINE

if TYPE_CHECKING:
    from specbench_cli.measure.method_costs import InterleavedProbe


def measure_repeat(
    plan: Plan,
    run_dir: RunDir,
    view: RunView,
    number: int,
    in_turn: Path | None,
    force: bool,
    part: str = "",
) -> None:
    """Measure the missing outputs of a repeat in the current process.

    Args:
        plan: Plan of the run.
        run_dir: Folder of the run.
        view: Display of progress and notes.
        number: Number of the repeat, from 1.
        in_turn, force: See `run.measure_run`.
        part: Name that the display shows for this part of the run. Default: "pass 2 of 3" and so
            on.

    Raises:
        WorkerLost: a method could not be measured to the end, because its worker process ended.
    """
    # Import here and not at the top, because these modules import torch, which takes seconds.
    from specbench_cli.measure.accept_rates import provide_rates
    from specbench_cli.measure.bench import Bench
    from specbench_cli.measure.isolation.plugin_methods import PluginMethods
    from specbench_cli.measure.method_costs import InterleavedProbe, provide_costs
    from specbench_cli.measure.repeat import Repeat
    from specbench_cli.measure.stored_outputs import StoredOutputs

    if not part and plan.config.repeats > 1:
        part = f"pass {number} of {plan.config.repeats}"
    view.stage("loading " + ", ".join(each.label for each in plan.checkpoints.values()))
    machine_lock = None
    if in_turn is not None:
        machine_lock = get_machine_lock(in_turn.resolve())  # kept until this process ends
        machine_lock.waits_for_partner &= not run_dir.manifest.get("alone")
    # If a method does not load, a run continues without it. A tuning stops, because it must compare
    # all candidates.
    lenient = part != TUNING
    with closing(Bench(plan, lenient=lenient)) as bench:
        plan = _drop_unloadable(plan, bench.load_errors, run_dir, view)
        bench.check_first_turns()
        provide_costs(plan, bench, run_dir)
        plan = provide_rates(plan, bench, run_dir, view)
        threads = bench.resolved_config()["threads"]
        plugins = PluginMethods(plan, run_dir, threads)
        plan = _drop_unloadable(plan, plugins.load_errors, run_dir, view)
        models, heads = bench.model_entries(), {**bench.head_entries(), **plugins.heads}
        check_weights(run_dir, {**models, **heads}, force)
        effective = run_dir.manifest["config"]["effective"] | bench.resolved_config()
        effective["devices"] = bench.devices
        run_dir.update(models=models, heads=heads, config={"effective": effective})
        rounds, probe = plan.config.probe, None
        if rounds is not None and part != TUNING:
            view.stage("warming up the probe")
            probe = InterleavedProbe(plan, bench, rounds, plugins.labels)
        stored_outputs = StoredOutputs.read(run_dir)
        repeat = Repeat(
            plan, bench, run_dir, stored_outputs, view, machine_lock, plugins, part, probe
        )
        for load_number in plan.passes(number):
            repeat.run(load_number)
        if probe is not None:
            _store_costs(probe, run_dir, view, number)
        run_dir.update(
            # Near-ties are searched only once in a run, so keep the result of an earlier repeat.
            near_ties=run_dir.manifest.get("near_ties") or repeat.find_near_ties(),
            tolerance=repeat.judge.facts() or run_dir.manifest.get("tolerance"),
            memory=bench.memory_entry(),
            energy=bench.energy.facts(),
        )
    if repeat.left_out:
        labels, why = ", ".join(repeat.left_out), next(iter(repeat.left_out.values()))
        raise WorkerLost(
            f"{labels} could not be measured to the end: {why.message}",
            hint=resume_command(run_dir.path),
        )


def _store_costs(probe: InterleavedProbe, run_dir: RunDir, view: RunView, number: int) -> None:
    """Store the costs that a probe measured between the prompts, or show why there are no costs."""
    costs = probe.costs()
    if costs is not None:
        try:
            costs.save(run_dir.path / COSTS.format(number))
        except UsageError as fault:  # a file of the user is in the way, but the run is complete
            view.note(f"the costs were not stored: {fault.message}")
    elif probe.done:
        view.note("probe: other programs used too much CPU, so no costs were stored")


def _drop_unloadable(
    plan: Plan, load_errors: Mapping[str, SpecbenchError], run_dir: RunDir, view: RunView
) -> Plan:
    """Return the plan without methods whose trained modules do not load.

    Show a note for each removed method, and store the reason in the manifest. Removed methods that
    already have records stay in the manifest.

    Args:
        load_errors: Label of the method -> the error.

    Raises:
        SpecbenchError: only vanilla is left. This is the error of the first removed method.
    """
    rest = plan.drop_methods(load_errors)
    if load_errors and all(method_run.label == BASELINE for method_run in rest.method_runs):
        raise next(iter(load_errors.values()))
    before = run_dir.manifest.get("left_out") or {}
    found = {label: format_reason(fault) for label, fault in load_errors.items()}
    new = {label: why for label, why in found.items() if label not in before}
    for words in left_out_notes(new):
        view.note(words)
    # If the user has repaired the files of a method, the method runs again. Remove its old error.
    runnable = {method_run.label for method_run in rest.method_runs}
    left_out = {label: why for label, why in before.items() if label not in runnable}
    left_out |= {label: redact_paths(why) for label, why in found.items()}
    if left_out != before:
        answered = run_dir.read_output_ids()
        # A left-out method may have records from an earlier start of the run. They stay valid, so
        # keep the manifest entry of this method.
        recorded = {label for _, _, label, _ in answered} - runnable
        recorded_entries = [row for row in run_dir.manifest["rows"] if row["label"] in recorded]
        run_dir.update(left_out=left_out, rows=[*method_entries(rest), *recorded_entries])
        view.started(rest.n_outputs, len(answered), run_dir.path)
    return rest
