"""A run: plan, passes, resume, manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import files, registry
from specbench_cli.config import permission, plugin_file
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import (
    ConcurrentWriteError,
    ExitCode,
    SpecbenchError,
    UsageError,
    WorkerLost,
)
from specbench_cli.files import refuse_link
from specbench_cli.judge.broken import broken
from specbench_cli.measure.isolation.rooms import check_plugins, close_rooms
from specbench_cli.measure.machine_lock import own as own_turns
from specbench_cli.measure.manifest import is_placed, manifest, now, program, rows
from specbench_cli.measure.memory import free_memory
from specbench_cli.measure.repeats import TUNING, resumption, run_apart
from specbench_cli.measure.shown import without_folders
from specbench_cli.measure.view import RunView
from specbench_cli.measure.window import noisy
from specbench_cli.plan import tune
from specbench_cli.plan.controls import controlled
from specbench_cli.plan.plan import REFERENCE, Plan, fitting, make_plan, reason
from specbench_cli.plan.tune import Tuning
from specbench_cli.store import matrix
from specbench_cli.store.run_dir import COSTS, MOST_BYTES, ORDER, RunDir, new_path
from specbench_cli.store.schema import Key, Record

if TYPE_CHECKING:
    from specbench_cli.measure.method_costs import Between

VOID_SHARE = 0.1  # a row that lost more of its cells to noise has no speedup

_TUNING = 0
"""The number of the pass that chooses parameters."""

_ANEW = "begin a new run: specbench run"


@dataclass(frozen=True)
class Result:
    """Where a run's records are, what the program should exit with, and whether times are missing
    since the machine was not quiet."""

    run_dir: Path
    exit_code: ExitCode
    void: bool


def start(
    config: RunConfig, sources: Mapping[str, str], out: Path | None, view: RunView
) -> tuple[Plan, RunDir]:
    """Plan a new run and make its folder; nothing is left behind where that cannot be done."""
    from specbench_cli.plan.placement import check_places

    ordered = config
    check_plugins(config)
    config, left_out = fitting(config, fetch=True)
    config = controlled(config)
    config, memory = _within(config)
    plan, tuning = planned(config)
    if config.executor == "local":  # else a worker looks what its machine has
        check_places(plan)
    view.planned(facts(plan, tuning))
    for words in (*plan.missing, *_unfit(left_out), *_bounded(memory)):
        view.note(words)
    names = "-".join(task.name for task in plan.tasks)
    path = out or new_path(names, config.model_dump(mode="json"))
    why = {label: without_folders(words) for label, words in left_out.items()}
    told = {**manifest(plan, sources), "left_out": why, "memory_budget": memory}
    run_dir = RunDir.create(path, told, order=config.model_dump_json())
    # The user started this run, so resuming it needs no further permission.
    permission.permit(permission.requests(ordered, path / ORDER))
    return plan, run_dir


def dry(config: RunConfig) -> tuple[Plan, dict[str, Any]]:
    """The plan of a run that is not begun, and its facts, those of rows that cannot run among
    them."""
    check_plugins(config)
    config, left_out = fitting(config, fetch=False)
    config = controlled(config)
    config, memory = _within(config)
    plan, tuning = planned(config)
    beside = {"left_out": _unfit(left_out), "memory_budget": memory}
    return plan, {**facts(plan, tuning), **{name: each for name, each in beside.items() if each}}


def _within(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    """See `memory.within`, which takes torch."""
    if config.memory_budget is None:
        return config, None
    from specbench_cli.measure.memory_budget import within

    return within(config)


def _bounded(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    from specbench_cli.measure.memory_budget import sentence

    return [f"--memory-budget: {sentence(told)}"]


def _unfit(left_out: Mapping[str, str]) -> list[str]:
    return [f"{label} is left out, it cannot run here: {why}" for label, why in left_out.items()]


def reopen(
    path: Path, view: RunView, *, part: bool = False, force: bool = False
) -> tuple[Plan | None, RunDir]:
    """Plan the rest of a run; None if it is finished.

    Args:
        part: whether the process that started this one holds the folder.
        force: go on though the program changed since, and label the run.
    Raises:
        UsageError: no run, one that cannot be resumed, that another process is at, or that another
            program, or data, would go on with.
    """
    run_dir = RunDir.open(path)
    if run_dir.manifest.get("status") == "finished":
        if not part:
            run_dir.remove_dead_lock()
        if force and not part:
            run_dir.hold()
            try:
                run_dir.accept_changes()
            finally:
                run_dir.release()
        return None, run_dir
    if part:
        run_dir.share_parent_lock()
    else:
        run_dir.hold()
    try:
        run_dir.read()  # whoever held the folder until now may have finished the run
        if run_dir.manifest.get("status") == "finished":
            run_dir.release()
            return None, run_dir
        return _replanned(run_dir, view, force, part=part), run_dir
    except BaseException:
        run_dir.release()
        raise


def _replanned(run_dir: RunDir, view: RunView, force: bool, *, part: bool) -> Plan:
    """The plan of a run that was begun, which is marked as running again."""
    path = run_dir.path
    if "spoiled" in run_dir.manifest:
        raise run_dir.spoiled(f"{run_dir.manifest['spoiled']} changed its files")
    config = _ordered(path)
    run_dir.order = config.model_dump_json()
    if not part:  # the parent process has checked already
        _check_programs(run_dir, config, force)
    first, tuning = planned(config)
    plan = tune.tuned(first, run_dir.manifest)
    view.planned(facts(plan, tuning))
    answered = run_dir.answered()  # a damaged record is told before anything changes
    begun, going_on = run_dir.manifest.get("program", {}), program(first)
    theirs: dict[str, str] = {}
    if config.executor != "local":  # what is said of the machine is the workers', who look at it
        theirs = {key: word for key, word in begun.items() if is_placed(key)}
    _same(run_dir, {key: begun[key] for key in begun if key not in theirs}, going_on, force)
    _check_planned(plan, run_dir, answered)
    run_dir.update(status="running", program=going_on | theirs)
    return plan


def permissions_to_resume(path: Path, force: bool) -> list[permission.PermissionRequest]:
    """Return the permission requests of resuming a run or the runs of a matrix.

    Raises:
        UsageError: a plug-in changed since the run began, or the run cannot be resumed.
    """
    if not matrix.is_matrix(path):
        run_dir = RunDir.open(path)
        if run_dir.manifest.get("status") == "finished":
            return []
        config = _ordered(path)
        _check_plugins(run_dir, config, force)
        return permission.requests(config, path / ORDER)
    found, order = list[permission.PermissionRequest](), matrix.ordered(path)
    for each in matrix.members(path):
        if RunDir.holds_run(each):
            found += permissions_to_resume(each, force)
        elif order is not None:
            config = RunConfig.model_validate_json(order.runs[each.name])
            found += permission.requests(config, matrix.order_file(path))
    return found


def _check_programs(run_dir: RunDir, config: RunConfig, force: bool) -> None:
    """Raise UsageError if a plug-in changed or the user did not permit it.

    This check runs before any code of the plug-in.
    """
    plugin_file.release()
    _check_plugins(run_dir, config, force)
    place = run_dir.path / ORDER
    permission.check(permission.requests(config, place), str(place))


def _check_plugins(run_dir: RunDir, config: RunConfig, force: bool) -> None:
    """Raise UsageError if a plug-in file changed since the run began."""
    held = run_dir.manifest.get("method_files") or {}
    theirs = {name: each for name, each in held.items() if name not in registry.without_plugins()}
    changed = permission.same_plugins(theirs, config.plugins)
    if changed and not force:
        then = {f"the file of {name}": theirs[name][:12] for name, _ in changed}
        _same(run_dir, then, {f"the file of {name}": now[:12] for name, now in changed}, force)


def _same(run_dir: RunDir, then: Mapping[str, str], now: Mapping[str, str], force: bool) -> None:
    """Raise UsageError unless a run goes on with what it was begun with; with `force`, have the
    manifest name what differs."""
    differing = [
        f"{name} ({then.get(name, 'none')} then, {now.get(name, 'none')} since)"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if differing and not force:
        raise UsageError(
            f"{run_dir.path} was begun with something else, and a run measures one thing; changed"
            f" since: {', '.join(differing)}",
            hint=f"{_ANEW}; or go on and label the run: {resumption(run_dir.path)} --force",
        )
    if differing:
        run_dir.update(mixed=[*run_dir.manifest.get("mixed", []), *differing])


def _ordered(path: Path) -> RunConfig:
    """The configuration that a run was begun with. Raises UsageError."""
    try:
        return RunConfig.model_validate_json(files.read_text(path / ORDER, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be resumed: its {ORDER} is missing or damaged",
            hint=_ANEW,
        ) from error


def run(
    plan: Plan | None,
    run_dir: RunDir,
    view: RunView,
    *,
    only_pass: int | None = None,
    fresh: bool = False,
    force: bool = False,
    in_turn: Path | None = None,
) -> Result:
    """Do what a run still lacks; without a plan, nothing.

    With several passes each runs in a fresh process, and so does a tuning before them; so does the
    only pass of a run whose methods have workers, since what happens to processes that compute at
    once shall not happen to the run. `only_pass` is what such a process is told.
    Interrupted or failing, the manifest says so, and everything settled until then is kept. A
    `fresh` run that fails before its first record could only fail again: its folder goes. Runs that
    are given the same file `in_turn` measure in turn. Of `force` see `reopen`.
    """
    if plan is None:
        run_dir.forget_order()  # a previous process was killed during its last steps
        view.note(f"{run_dir.path} is finished: nothing is missing")
        return _result(run_dir)
    untuned = plan.config.tune is not None and run_dir.manifest.get("tuning") is None
    alone = only_pass is None and plan.config.repeats == 1 and not plan.parallel
    dealt = plan.config.executor != "local"
    try:
        if only_pass is None and run_dir.manifest.get("alone"):
            run_dir.update(alone=False)  # resumed: a partner may come this time
        if untuned and (alone or only_pass == _TUNING):
            plan = _tune(run_dir, view, in_turn, force)
        if only_pass != _TUNING:
            view.started(plan.cells, len(run_dir.answered()), run_dir.path)
        if dealt:
            _run_dealt(plan, run_dir, view, in_turn, force)
        elif alone:
            _run_pass(plan, run_dir, view, 1, in_turn, force)
        elif only_pass is None:
            close_rooms()
            flags = [*view.flags(), *([] if in_turn is None else ["--in-turn", str(in_turn)])]
            flags += ["--force"] if force else []
            for number in range(_TUNING if untuned else 1, plan.config.repeats + 1):
                what = TUNING if number == _TUNING else f"pass {number}"
                view.handed_over()
                run_apart(run_dir, number, what, flags, kept=_measured(run_dir))
                run_dir.read()
                if plan.is_over(run_dir.manifest.get("dropped") or {}):
                    break
        elif only_pass != _TUNING:
            _run_pass(plan, run_dir, view, only_pass, in_turn, force)
        run_dir.read()  # what other processes wrote
        if only_pass is None:
            _check_complete(plan, run_dir)
            # Read every record, so that a wrong one is found before the run is marked as finished.
            loud = [record.other_cpu for record in run_dir.records() if noisy(record.other_cpu)]
            is_noisy = plan.config.allow_noise and bool(loud)
            run_dir.close("finished", finished_utc=now(), noisy=is_noisy)
            run_dir.forget_order()
    except BaseException as fault:
        empty = fresh and isinstance(fault, SpecbenchError) and "spoiled" not in run_dir.manifest
        empty = empty and not isinstance(fault, ConcurrentWriteError)
        if empty and not _measured(run_dir):
            run_dir.discard()
        else:
            # The disk is full, another process uses the folder, or a file is damaged: keep the
            # status "running", with which a resumption accepts lines without a digest.
            with suppress(OSError, ConcurrentWriteError, UsageError):
                with suppress(ConcurrentWriteError, UsageError):  # then this one is written back
                    run_dir.read()
                if only_pass is None and not alone and not dealt:
                    run_dir.adopt_lines()
                run_dir.close("interrupted")
        raise
    finally:
        close_rooms()
        run_dir.release()
    return _result(run_dir)


def _result(run_dir: RunDir) -> Result:
    records = list(run_dir.records())
    return Result(run_dir.path, exit_code(records, run_dir.manifest), void(records))


def _check_planned(plan: Plan, run_dir: RunDir, answered: Iterable[Key]) -> None:
    """Raise UsageError if the run contains a record or a prompt that is not in its plan.

    A run that was resumed with --force may have had another plan before. It is labelled.
    """
    if run_dir.manifest.get("mixed"):
        return
    keys = set(plan.keys())
    if foreign := next((key for key in answered if key not in keys), None):
        raise run_dir.foreign_record(foreign)
    run_dir.check_prompts({key[:2] for key in keys})


def planned(config: RunConfig) -> tuple[Plan, Tuning | None]:
    """The plan of a run, and of the tuning before it where it is tuned; see `make_plan`."""
    check_plugins(config)
    plan = make_plan(config)
    return (plan, None) if config.tune is None else tune.prepare(plan)


def facts(plan: Plan, tuning: Tuning | None) -> dict[str, Any]:
    """The plan for a person or a program to read."""
    if tuning is None:
        return plan.facts()
    return {
        **plan.facts(),
        "tuning": {
            "by": plan.config.tune_by,
            "development": len(tuning.development),
            "held_out": len(plan.questions),
            "candidates": {row: len(arms) for row, arms in tuning.rows.items()},
            "cells": tune.rehearsal(plan, tuning).cells,
        },
    }


def _tune(run_dir: RunDir, view: RunView, in_turn: Path | None, force: bool) -> Plan:
    """Do what a tuning still lacks, in a folder of its own; the plan with what it chose."""
    plan, tuning = planned(_ordered(run_dir.path))
    assert tuning is not None
    rehearsal = tune.rehearsal(plan, tuning)
    path = run_dir.path / tune.FOLDER
    refuse_link(path)
    if RunDir.holds_run(path):
        trial = RunDir.open(path)
        trial.share_lock_of(run_dir)
        _check_planned(rehearsal, trial, trial.answered())
        trial.resume()
    else:
        trial = RunDir.create(path, manifest(rehearsal, {}))
        trial.share_lock_of(run_dir)
    view.note(
        f"tuning: {len(rehearsal.arms)} candidates of {len(plan.arms)} rows on"
        f" {len(tuning.development)} development questions"
    )
    view.started(rehearsal.cells, len(trial.answered()), path)
    try:
        _run_pass(rehearsal, trial, view, 1, in_turn, force, part=TUNING)
    except BaseException:
        with suppress(OSError, ConcurrentWriteError):
            trial.close("interrupted")
            if not trial.answered():
                trial.discard()
        raise
    free_memory()
    _check_complete(rehearsal, trial, resumed=run_dir.path)
    trial.close("finished", finished_utc=now())
    models = {**trial.manifest["models"], **trial.manifest["heads"]}
    weights = {name.partition(" ")[0]: held["weight_bytes"] for name, held in models.items()}
    choices = tune.choose(tuning, list(trial.records()), plan.config.tune_by, weights)
    found = tune.facts(plan, tuning, choices)
    chosen = tune.tuned(plan, {"tuning": found})
    run_dir.update(
        tuning=found,
        rows=rows(chosen),
        step_costs=trial.manifest.get("step_costs"),  # what methods chose by then and choose by now
    )
    return chosen


def _check_complete(plan: Plan, run_dir: RunDir, resumed: Path | None = None) -> None:
    """Compare a run's records with its plan before the run is marked as finished.

    Args:
        resumed: folder of the run to resume to measure missing outputs; None: this run.

    Raises:
        ConcurrentWriteError: records are missing that the run measured, or another program changed
            or added some.
        UsageError: a record or a prompt is not in the plan.
    """
    if plan.config.tune is not None:
        plan = tune.tuned(plan, run_dir.manifest)
    answered = run_dir.reread_answered()
    asked = {(prompt.prompt_id, prompt.turn) for prompt in run_dir.prompts()}
    if lost := [key for key in answered if key[:2] not in asked]:
        raise ConcurrentWriteError(
            f"{run_dir.path / 'prompts.jsonl'} lacks {lost[0][0]}, turn {lost[0][1]}, which this"
            " run decoded: it was removed or overwritten during the run",
            hint=_ANEW,
        )
    if missing := plan.missing_from(answered, run_dir.manifest, run_dir.wrote):
        prompt, turn, label, pass_ = missing[0]
        raise ConcurrentWriteError(
            f"{run_dir.path / 'records.jsonl'} lacks {len(missing)} records that this run measured,"
            f" the first that of {label} on {prompt} (turn {turn}, pass {pass_}): they were removed"
            " or overwritten during the run",
            hint=f"{resumption(resumed or run_dir.path)} measures them again",
        )
    _check_planned(plan, run_dir, answered)


def _measured(run_dir: RunDir) -> bool:
    """Whether anything was measured that would be lost with the folder."""
    return run_dir.has_records or (run_dir.path / tune.FOLDER).exists()


def exit_code(records: Sequence[Record], manifest: Mapping[str, Any]) -> ExitCode:
    """Bad if a row is broken or a cell failed; else a fault of the environment if too many times
    are void, methods could not run, or only vanilla has outputs; otherwise OK.

    Peers are measured, not judged: nothing they do makes an answer bad.
    """
    ours = [record for record in records if not record.peer]
    if any(record.error is not None for record in ours) or broken(ours, manifest):
        return ExitCode.BAD_ANSWER
    lacking = manifest.get("left_out") or nothing_compared(records, manifest)
    return ExitCode.ENVIRONMENT if void(records) or lacking else ExitCode.OK


def nothing_compared(records: Sequence[Record], manifest: Mapping[str, Any]) -> bool:
    """Return True if every method except vanilla was dropped or failed on all prompts."""
    others = {record.label for record in records if record.method != REFERENCE}
    measured = {record.label for record in records if record.error is None}
    return bool(others) and not others & measured - {*(manifest.get("dropped") or {})}


def void(records: Sequence[Record]) -> bool:
    """Whether a row lost so many of its times to noise that it has no speedup."""
    rows: dict[str, list[bool]] = {}
    for record in records:
        rows.setdefault(record.label, []).append(record.void)
    return any(sum(row) > VOID_SHARE * len(row) for row in rows.values())


def _run_pass(
    plan: Plan,
    run_dir: RunDir,
    view: RunView,
    number: int,
    in_turn: Path | None,
    force: bool,
    part: str = "",
) -> None:
    # Reading weights takes torch and seconds: nothing above needs it.
    from specbench_cli.measure.accept_rates import provide_rates
    from specbench_cli.measure.bench import Bench
    from specbench_cli.measure.isolation.guests import Guests
    from specbench_cli.measure.method_costs import Between, provide_costs
    from specbench_cli.measure.passes import Answers, Pass

    if not part and plan.config.repeats > 1:
        part = f"pass {number} of {plan.config.repeats}"
    view.stage("loading " + ", ".join(each.label for each in plan.checkpoints.values()))
    turns = None
    if in_turn is not None:
        turns = own_turns(in_turn.resolve())  # registered until this process ends
        turns.waits_for_partner &= not run_dir.manifest.get("alone")
    lenient = part != TUNING  # which has candidates, not rows
    with closing(Bench(plan, lenient=lenient)) as bench:
        plan = _able(plan, bench.unfit, run_dir, view)
        bench.check_first_turns()
        provide_costs(plan, bench, run_dir)
        plan = provide_rates(plan, bench, run_dir, view)
        threads = bench.resolved()["threads"]
        guests = Guests(plan, run_dir, threads)
        plan = _able(plan, guests.unfit, run_dir, view)
        models, heads = bench.models(), {**bench.heads(), **guests.heads}
        _check_weights(run_dir, {**models, **heads}, force)
        effective = run_dir.manifest["config"]["effective"] | bench.resolved()
        effective["devices"] = bench.devices
        run_dir.update(models=models, heads=heads, config={"effective": effective})
        rounds, between = plan.config.probe, None
        if rounds is not None and part != TUNING:
            view.stage("warming up the probe")
            between = Between(plan, bench, rounds, guests.labels)
        pass_ = Pass(
            plan, bench, run_dir, Answers.read(run_dir), view, turns, guests, part, between
        )
        for own in plan.passes(number):
            pass_.run(own)
        if between is not None:
            _keep_costs(between, run_dir, view, number)
        run_dir.update(
            # The first pass that needed a tolerance measured it; one that did not knows nothing.
            near_ties=run_dir.manifest.get("near_ties") or pass_.near_ties(),
            tolerance=pass_.judge.facts() or run_dir.manifest.get("tolerance"),
            memory=bench.memory(),
            energy=bench.energy.facts(),
        )
    if pass_.left_out:
        labels, why = ", ".join(pass_.left_out), next(iter(pass_.left_out.values()))
        raise WorkerLost(
            f"{labels} could not be run to the end: {why.message}",
            hint=resumption(run_dir.path),
        )


def _keep_costs(between: Between, run_dir: RunDir, view: RunView, number: int) -> None:
    """Keep what was probed between a pass's prompts; say so if it is worth nothing."""
    costs = between.costs()
    if costs is not None:
        try:
            costs.save(run_dir.path / COSTS.format(number))
        except UsageError as fault:  # the user's own file is kept; the run itself is complete
            view.note(f"the costs were not stored: {fault.message}")
    elif between.done:
        view.note("probe: other programs took too much of this machine: no costs were kept")


def _run_dealt(
    plan: Plan, run_dir: RunDir, view: RunView, in_turn: Path | None, force: bool
) -> None:
    """All passes, each by fresh workers of a cluster."""
    from specbench_cli.measure.cluster.dealing import Dealing
    from specbench_cli.measure.cluster.ray_crew import connected

    if in_turn is not None:
        raise UsageError(
            f"--in-turn {in_turn}: runs of one machine take turns, and --executor"
            f" {plan.config.executor} measures on others",
            hint="leave one of the two out",
        )
    check = partial(_check_weights, run_dir, force=force)
    for number in range(1, plan.config.repeats + 1):
        with connected() as crew:
            dealing = Dealing(plan, run_dir, view, crew, number, check=check, force=force)
            dealing.run()
        if dealing.is_over:
            break


def _able(plan: Plan, unfit: Mapping[str, SpecbenchError], run_dir: RunDir, view: RunView) -> Plan:
    """The plan without rows whose heads turned out not to load; the manifest and the view are told.
    The manifest keeps a row that has records. Raises the first one's fault where only vanilla would
    be left."""
    rest = plan.without(unfit)
    if unfit and all(arm.label == REFERENCE for arm in rest.arms):
        raise next(iter(unfit.values()))
    before = run_dir.manifest.get("left_out") or {}
    found = {label: reason(fault) for label, fault in unfit.items()}
    for words in _unfit({label: why for label, why in found.items() if label not in before}):
        view.note(words)
    able = {arm.label for arm in rest.arms}  # one that was mended since can run again
    left_out = {label: why for label, why in before.items() if label not in able}
    left_out |= {label: without_folders(why) for label, why in found.items()}
    if left_out != before:
        answered = run_dir.answered()
        # The head of such a row loaded when the run began: its records stay valid.
        recorded = {label for _, _, label, _ in answered} - able
        kept = [row for row in run_dir.manifest["rows"] if row["label"] in recorded]
        run_dir.update(left_out=left_out, rows=[*rows(rest), *kept])
        view.started(rest.cells, len(answered), run_dir.path)
    return rest


def _check_weights(run_dir: RunDir, held: Mapping[str, Mapping[str, Any]], force: bool) -> None:
    """Raise UsageError unless models and heads are those that the run was begun with (`_same`)."""
    before = {**run_dir.manifest.get("models", {}), **run_dir.manifest.get("heads", {})}
    if before:
        _same(run_dir, _weights(before), _weights(held), force)


def _weights(held: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {f"the weights of {name}": facts["sha256"][:12] for name, facts in held.items()}
