"""Runs from start to end: plan or resume a run, measure its repeats, and finish its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from specbench_cli.config import permission
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import ConcurrentWriteError, SpecbenchError, UsageError
from specbench_cli.files import check_no_link
from specbench_cli.measure.isolation.plugin_process import end_plugin_processes
from specbench_cli.measure.local import measure_repeat
from specbench_cli.measure.manifest import (
    build_manifest,
    is_machine_key,
    method_entries,
    program_facts,
    utc_now,
)
from specbench_cli.measure.memory import free_memory
from specbench_cli.measure.planning import left_out_notes, plan_facts, plan_run, prepare_run
from specbench_cli.measure.quiet import is_noisy
from specbench_cli.measure.redaction import redact_paths
from specbench_cli.measure.repeat_process import TUNING, run_repeat
from specbench_cli.measure.result import RunResult, read_result
from specbench_cli.measure.run_checks import (
    check_complete,
    check_planned,
    check_plugin_files,
    check_plugin_permission,
    check_unchanged,
    check_weights,
    load_resume_config,
)
from specbench_cli.measure.view import RunView
from specbench_cli.plan import tune
from specbench_cli.plan.plan import Plan
from specbench_cli.store import matrix
from specbench_cli.store.manifest import RESUME_FILE
from specbench_cli.store.run_dir import RunDir, new_path

_TUNING = 0
"""The number of the repeat that chooses parameters."""


def start_run(
    config: RunConfig, sources: Mapping[str, str], out: Path | None, view: RunView
) -> tuple[Plan, RunDir]:
    """Plan a new run and create its folder. If an error occurs, no folder is left behind.

    Args:
        config: Configuration of the run.
        sources: Name of each setting -> origin of its value, such as "command line" or a file name.
        out: Folder of the run. If None, a new folder is chosen.
        view: Display of progress and notes.
    """
    from specbench_cli.measure.placement import check_placement

    prepared = prepare_run(config, fetch=True)
    plan = prepared.plan
    if config.executor == "local":  # with other executors, workers check their machines
        check_placement(plan)
    view.planned(plan_facts(plan, prepared.tuning))
    for words in (
        *plan.unused_notes,
        *left_out_notes(prepared.left_out),
        *_memory_notes(prepared.memory),
    ):
        view.note(words)
    names = "-".join(task.name for task in plan.tasks)
    path = out or new_path(names, plan.config.model_dump(mode="json"))
    why = {label: redact_paths(words) for label, words in prepared.left_out.items()}
    new_manifest = {
        **build_manifest(plan, sources),
        "left_out": why,
        "memory_budget": prepared.memory,
    }
    run_dir = RunDir.create(path, new_manifest, resume_config=plan.config.model_dump_json())
    # The user has started this run and its plug-ins. So a later resumption needs no further
    # permission.
    permission.permit(permission.collect_requests(config, path / RESUME_FILE))
    return plan, run_dir


def _memory_notes(memory: Mapping[str, Any] | None) -> list[str]:
    """Return a note on the settings that the memory budget chose, if there is a budget."""
    if memory is None:
        return []
    from specbench_cli.measure.memory_budget import describe_choice

    return [f"--memory-budget: {describe_choice(memory)}"]


def resume_run(
    path: Path, view: RunView, *, part: bool = False, force: bool = False
) -> tuple[Plan | None, RunDir]:
    """Plan the missing part of a run that was started before.

    Return no plan if the run is finished.

    Args:
        path: Folder of the run.
        view: Display of progress and notes.
        part: True if this process measures one repeat for its parent process. The parent process
            has locked the folder.
        force: True continues even if the software or data has changed since the start of the run.
            The manifest then labels the run as mixed.

    Raises:
        UsageError: there is no run in the folder, it cannot be resumed, another process uses it, or
            the software or data has changed.
    """
    run_dir = RunDir.open(path)
    if run_dir.manifest.get("status") == "finished":
        if not part:
            run_dir.remove_dead_lock()
        if force and not part:
            run_dir.acquire_lock()
            try:
                run_dir.accept_changes()
            finally:
                run_dir.release()
        return None, run_dir
    if part:
        run_dir.share_parent_lock()
    else:
        run_dir.acquire_lock()
    try:
        run_dir.read()  # another process may have finished the run before this one got the lock
        if run_dir.manifest.get("status") == "finished":
            run_dir.release()
            return None, run_dir
        return _plan_again(run_dir, view, force, part=part), run_dir
    except BaseException:
        run_dir.release()
        raise


def _plan_again(run_dir: RunDir, view: RunView, force: bool, *, part: bool) -> Plan:
    """Return the plan of a run that was started before, and mark the run as running.

    Args:
        run_dir, view, force, part: See `resume_run`.
    """
    path = run_dir.path
    if "spoiled" in run_dir.manifest:
        raise run_dir.tampering_error(f"{run_dir.manifest['spoiled']} changed its files")
    config = load_resume_config(path)
    run_dir.resume_config = config.model_dump_json()
    if not part:  # the parent process has already checked
        check_plugin_permission(run_dir, config, force)
    first, tuning = plan_run(config)
    plan = tune.apply_tuning(first, run_dir.manifest)
    view.planned(plan_facts(plan, tuning))
    answered = run_dir.read_output_ids()  # report a damaged record before changing anything
    begun, going_on = run_dir.manifest.get("program", {}), program_facts(first)
    theirs: dict[str, str] = {}
    if config.executor != "local":  # workers check the facts about their machines
        theirs = {key: word for key, word in begun.items() if is_machine_key(key)}
    check_unchanged(
        run_dir, {key: begun[key] for key in begun if key not in theirs}, going_on, force
    )
    check_planned(plan, run_dir, answered)
    run_dir.update(status="running", program=going_on | theirs)
    return plan


def permissions_to_resume(path: Path, force: bool) -> list[permission.PermissionRequest]:
    """Return the permissions that the user must give before a run or a matrix is resumed.

    A matrix is a folder of several runs. For example, plug-ins need a permission, because resuming
    a run executes their code.

    Args:
        path: Folder of the run or the matrix.
        force: See `resume_run`.

    Raises:
        UsageError: a plug-in has changed since the run was started, or the run cannot be
            resumed.
    """
    if not matrix.is_matrix(path):
        run_dir = RunDir.open(path)
        if run_dir.manifest.get("status") == "finished":
            return []
        config = load_resume_config(path)
        check_plugin_files(run_dir, config, force)
        return permission.collect_requests(config, path / RESUME_FILE)
    found, order = list[permission.PermissionRequest](), matrix.read_config(path)
    for each in matrix.run_folders(path):
        if RunDir.holds_run(each):
            found += permissions_to_resume(each, force)
        elif order is not None:
            config = RunConfig.model_validate_json(order.runs[each.name])
            found += permission.collect_requests(config, matrix.resume_file(path))
    return found


def measure_run(
    plan: Plan | None,
    run_dir: RunDir,
    view: RunView,
    *,
    only_pass: int | None = None,
    fresh: bool = False,
    force: bool = False,
    in_turn: Path | None = None,
) -> RunResult:
    """Measure the missing outputs of a run, and return its result.

    If the run fails or is interrupted, the stored records are kept. The manifest then states the
    failure or interruption.

    Args:
        plan: Plan of the run. None if the run is already finished.
        run_dir: Folder of the run.
        view: Display of progress and notes.
        only_pass: Number of the repeat that this process measures for its parent. None measures all
            repeats.
        fresh: True if this is a new run. If a new run fails before its first record, its folder is
            removed, because a resumption would fail in the same way.
        force: See `resume_run`.
        in_turn: Lock file (`machine_lock`). Runs with the same lock file measure in turn.
    """
    if plan is None:
        run_dir.remove_resume_config()  # left behind if a process was killed at the end
        view.note(f"{run_dir.path} is finished: nothing is missing")
        return read_result(run_dir)
    try:
        if only_pass is None and run_dir.manifest.get("alone"):
            run_dir.update(alone=False)  # when resumed, a partner may start this time
        plan = _measure(plan, run_dir, view, only_pass, in_turn, force)
        run_dir.read()  # include changes of other processes
        if only_pass is None:
            _finish(plan, run_dir)
    except BaseException as fault:
        local = plan.config.executor == "local"
        in_processes = only_pass is None and local and not _in_one_process(plan)
        _mark_interrupted(run_dir, fault, fresh=fresh, in_processes=in_processes)
        raise
    finally:
        end_plugin_processes()
        run_dir.release()
    return read_result(run_dir)


def _in_one_process(plan: Plan) -> bool:
    """Return True if this process measures the run itself, without a process for each repeat.

    If a run has several repeats, each repeat is measured in a new process. A single repeat also
    gets its own process if a method has parallel workers. Then a crash of a worker cannot end the
    run.
    """
    return plan.config.repeats == 1 and not plan.parallel


def _measure(
    plan: Plan,
    run_dir: RunDir,
    view: RunView,
    only_pass: int | None,
    in_turn: Path | None,
    force: bool,
) -> Plan:
    """Measure the missing outputs of a run, and return its plan.

    If the run is tuned, the returned plan has the tuned parameters. The arguments are those of
    `measure_run`.
    """
    untuned = plan.config.tune is not None and run_dir.manifest.get("tuning") is None
    here = only_pass is None and _in_one_process(plan)
    if untuned and (here or only_pass == _TUNING):
        plan = _tune(run_dir, view, in_turn, force)
    if only_pass != _TUNING:
        view.started(plan.n_outputs, len(run_dir.read_output_ids()), run_dir.path)
    if plan.config.executor != "local":
        from specbench_cli.measure.cluster.ray_workers import measure_on_cluster

        check = partial(check_weights, run_dir, force=force)
        measure_on_cluster(plan, run_dir, view, in_turn, check, force=force)
    elif here:
        measure_repeat(plan, run_dir, view, 1, in_turn, force)
    elif only_pass is None:
        _measure_in_processes(plan, run_dir, view, in_turn, force, untuned=untuned)
    elif only_pass != _TUNING:
        measure_repeat(plan, run_dir, view, only_pass, in_turn, force)
    return plan


def _measure_in_processes(
    plan: Plan, run_dir: RunDir, view: RunView, in_turn: Path | None, force: bool, *, untuned: bool
) -> None:
    """Measure each repeat in a new process.

    Args:
        untuned: True if the parameters must first be chosen, in a separate process.
        plan, run_dir, view, in_turn, force: See `measure_run`.
    """
    end_plugin_processes()
    flags = [*view.flags(), *([] if in_turn is None else ["--in-turn", str(in_turn)])]
    flags += ["--force"] if force else []
    for number in range(_TUNING if untuned else 1, plan.config.repeats + 1):
        what = TUNING if number == _TUNING else f"pass {number}"
        view.hand_over()
        run_repeat(run_dir, number, what, flags, resumable=_has_results(run_dir))
        run_dir.read()
        if plan.is_over(run_dir.manifest.get("dropped") or {}):
            break


def _finish(plan: Plan, run_dir: RunDir) -> None:
    """Mark a run as finished. Raise the errors of `check_complete`."""
    check_complete(plan, run_dir)
    # Read every record before the run is marked as finished. A damaged record raises an error here.
    noisy_records = [record for record in run_dir.records() if is_noisy(record.other_cpu)]
    noisy = plan.config.allow_noise and bool(noisy_records)
    run_dir.close("finished", finished_utc=utc_now(), noisy=noisy)
    run_dir.remove_resume_config()


def _mark_interrupted(
    run_dir: RunDir, fault: BaseException, *, fresh: bool, in_processes: bool
) -> None:
    """Mark a run as interrupted, or remove its folder if the run is new and has no records.

    Args:
        run_dir: Folder of the run.
        fault: The exception that ended the run.
        fresh: True if this is a new run.
        in_processes: True if the processes of repeats, and not this process, wrote the records.
    """
    empty = fresh and isinstance(fault, SpecbenchError) and "spoiled" not in run_dir.manifest
    empty = empty and not isinstance(fault, ConcurrentWriteError)
    if empty and not _has_results(run_dir):
        run_dir.discard()
        return
    # Ignore errors of writing the manifest, such as a full disk or another process in the folder.
    # The status in the manifest then stays "running", and the run can still be resumed.
    with suppress(OSError, ConcurrentWriteError, UsageError):
        with suppress(ConcurrentWriteError, UsageError):  # if it is damaged, overwrite it
            run_dir.read()
        if in_processes:
            run_dir.store_line_digests()
        run_dir.close("interrupted")


def _tune(run_dir: RunDir, view: RunView, in_turn: Path | None, force: bool) -> Plan:
    """Choose the parameters of a run, by measuring candidates on development questions.

    The tuning is a separate run, in a folder inside the folder of the main run. The manifest of the
    main run stores the chosen parameters.

    Returns:
        The plan of the main run with the chosen parameters.
    """
    plan, tuning = plan_run(load_resume_config(run_dir.path))
    assert tuning is not None
    tuning_plan = tune.tuning_plan(plan, tuning)
    path = run_dir.path / tune.FOLDER
    check_no_link(path)
    if RunDir.holds_run(path):
        tuning_dir = RunDir.open(path)
        tuning_dir.share_lock_of(run_dir)
        check_planned(tuning_plan, tuning_dir, tuning_dir.read_output_ids())
        tuning_dir.mark_running()
    else:
        tuning_dir = RunDir.create(path, build_manifest(tuning_plan, {}))
        tuning_dir.share_lock_of(run_dir)
    view.note(
        f"tuning: {len(tuning_plan.method_runs)} candidates of {len(plan.method_runs)} methods on"
        f" {len(tuning.development)} development questions"
    )
    view.started(tuning_plan.n_outputs, len(tuning_dir.read_output_ids()), path)
    try:
        measure_repeat(tuning_plan, tuning_dir, view, 1, in_turn, force, part=TUNING)
    except BaseException:
        with suppress(OSError, ConcurrentWriteError):
            tuning_dir.close("interrupted")
            if not tuning_dir.read_output_ids():
                tuning_dir.discard()
        raise
    free_memory()
    check_complete(tuning_plan, tuning_dir, resumed=run_dir.path)
    tuning_dir.close("finished", finished_utc=utc_now())
    models = {**tuning_dir.manifest["models"], **tuning_dir.manifest["heads"]}
    weights = {name.partition(" ")[0]: entry["weight_bytes"] for name, entry in models.items()}
    choices = tune.choose(tuning, list(tuning_dir.records()), plan.config.tune_by, weights)
    found = tune.facts(plan, tuning, choices)
    chosen = tune.apply_tuning(plan, {"tuning": found})
    run_dir.update(
        tuning=found,
        rows=method_entries(chosen),
        step_costs=tuning_dir.manifest.get("step_costs"),  # the run uses the costs of its tuning
    )
    return chosen


def _has_results(run_dir: RunDir) -> bool:
    """Return True if the folder of a run contains records or a tuning."""
    return run_dir.has_records or (run_dir.path / tune.FOLDER).exists()
