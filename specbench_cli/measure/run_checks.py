"""Checks of a run: nothing has changed when it is resumed, and its records match its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specbench_cli import files, registry
from specbench_cli.config import permission, plugin_file
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import ConcurrentWriteError, UsageError
from specbench_cli.measure.repeat_process import resume_command
from specbench_cli.plan import tune
from specbench_cli.plan.plan import Plan
from specbench_cli.store.manifest import RESUME_FILE
from specbench_cli.store.run_dir import MOST_BYTES, RunDir
from specbench_cli.store.schema import RecordKey

NEW_RUN = "begin a new run: specbench run"


def load_resume_config(path: Path) -> RunConfig:
    """Return the configuration with which a run was started.

    Raises:
        UsageError: the file of the configuration is missing or damaged.
    """
    try:
        return RunConfig.model_validate_json(files.read_text(path / RESUME_FILE, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be resumed: its {RESUME_FILE} is missing or damaged",
            hint=NEW_RUN,
        ) from error


def check_plugin_permission(run_dir: RunDir, config: RunConfig, force: bool) -> None:
    """Raise UsageError if a plug-in has changed, or if the user has not permitted the plug-in.

    This check runs before any code of a plug-in is executed.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        force: True accepts changed plug-ins.
    """
    plugin_file.unpin_all()
    check_plugin_files(run_dir, config, force)
    place = run_dir.path / RESUME_FILE
    permission.check(permission.collect_requests(config, place), str(place))


def check_plugin_files(run_dir: RunDir, config: RunConfig, force: bool) -> None:
    """Raise UsageError if a plug-in file has changed since the run was started.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        force: True accepts changed files.
    """
    hashes = run_dir.manifest.get("method_files") or {}
    theirs = {
        name: each
        for name, each in hashes.items()
        if name not in registry.entries_without_plugins()
    }
    changed = permission.find_changed_plugins(theirs, config.plugins)
    if changed and not force:
        then = {f"the file of {name}": theirs[name][:12] for name, _ in changed}
        check_unchanged(
            run_dir, then, {f"the file of {name}": now[:12] for name, now in changed}, force
        )


def list_differences(ours: Mapping[str, str], theirs: Mapping[str, str], form: str) -> list[str]:
    """Return a text for each name whose value differs between two mappings.

    Args:
        ours, theirs: The mappings to compare: name -> value.
        form: Format string with three fields: the name, the value in `ours`, and the value in
            `theirs`.
    """
    return [
        form.format(name, ours.get(name, "none"), theirs.get(name, "none"))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def check_unchanged(
    run_dir: RunDir, then: Mapping[str, str], now: Mapping[str, str], force: bool
) -> None:
    """Raise UsageError if facts about a run have changed since the run was started.

    Args:
        run_dir: Folder of the run.
        then: The facts when the run was started: name -> value.
        now: The facts now: name -> value.
        force: True accepts changes, and adds them to the entry `mixed` of the manifest.
    """
    differing = list_differences(then, now, "{} ({} then, {} since)")
    if differing and not force:
        raise UsageError(
            f"{run_dir.path} cannot be resumed, because this has changed since it was started:"
            f" {', '.join(differing)}",
            hint=f"{NEW_RUN}; or continue and label the run as mixed:"
            f" {resume_command(run_dir.path)} --force",
        )
    if differing:
        run_dir.update(mixed=[*run_dir.manifest.get("mixed", []), *differing])


def check_weights(run_dir: RunDir, entries: Mapping[str, Mapping[str, Any]], force: bool) -> None:
    """Raise UsageError if the weights of models or heads have changed since the run was started.

    Args:
        run_dir: Folder of the run.
        entries: Manifest entries of the loaded models and heads.
        force: True accepts changed weights.
    """
    before = {**run_dir.manifest.get("models", {}), **run_dir.manifest.get("heads", {})}
    if before:
        check_unchanged(run_dir, _weights(before), _weights(entries), force)


def _weights(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {f"the weights of {name}": facts["sha256"][:12] for name, facts in entries.items()}


def check_planned(plan: Plan, run_dir: RunDir, answered: Iterable[RecordKey]) -> None:
    """Raise UsageError if the run contains a record or a prompt that is not in its plan.

    A run that was resumed with --force is not checked, because its plan may have changed.

    Args:
        plan: Plan of the run.
        run_dir: Folder of the run.
        answered: Keys of the stored records.
    """
    if run_dir.manifest.get("mixed"):
        return
    keys = set(plan.record_keys())
    if foreign := next((key for key in answered if key not in keys), None):
        raise run_dir.unplanned_record_error(foreign)
    run_dir.check_prompts({key[:2] for key in keys})


def check_complete(plan: Plan, run_dir: RunDir, resumed: Path | None = None) -> None:
    """Check that the records of a run match its plan, before it is marked as finished.

    Args:
        plan: Plan of the run.
        run_dir: Folder of the run.
        resumed: Folder of the run that the user must resume if outputs are missing. None means the
            checked run. For a tuning, it is the main run that contains the tuning.

    Raises:
        ConcurrentWriteError: records that the run measured are missing, or another program has
            changed or added records.
        UsageError: a record or a prompt is not in the plan.
    """
    if plan.config.tune is not None:
        plan = tune.apply_tuning(plan, run_dir.manifest)
    answered = run_dir.reread_output_ids()
    prompt_keys = {(prompt.prompt_id, prompt.turn) for prompt in run_dir.prompts()}
    if lost := [key for key in answered if key[:2] not in prompt_keys]:
        raise ConcurrentWriteError(
            f"{run_dir.path / 'prompts.jsonl'} lacks {lost[0][0]}, turn {lost[0][1]},"
            " which this run decoded: another program removed or overwrote it during the run",
            hint=NEW_RUN,
        )
    if missing := plan.find_missing(answered, run_dir.manifest, run_dir.has_written):
        prompt, turn, label, pass_ = missing[0]
        raise ConcurrentWriteError(
            f"{run_dir.path / 'records.jsonl'} lacks {len(missing)} records that this run measured:"
            f" the first is {label} on {prompt} (turn {turn}, pass {pass_}). Another program"
            " removed or overwrote them during the run",
            hint=f"{resume_command(resumed or run_dir.path)} measures them again",
        )
    check_planned(plan, run_dir, answered)
