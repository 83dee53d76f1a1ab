"""A run: plan, passes, resume, manifest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench_cli import __version__
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, ExitCode, SpecbenchError, UsageError
from specbench_cli.execute.plan import Plan, make_plan
from specbench_cli.execute.view import RunView
from specbench_cli.execute.window import noisy
from specbench_cli.measure.machine import fingerprint
from specbench_cli.report.standing import broken
from specbench_cli.store.run_dir import RunDir, new_path
from specbench_cli.store.schema import SCHEMA, Record

VOID_SHARE = 0.1  # a row that lost more of its cells to noise has no speedup

_ORDER = ".resume.json"
"""What was ordered, word for word: it may name folders of this machine, so it is not part of the
result and goes once the run is finished."""

_ANEW = "begin a new run: specbench run"

_CONCLUDED = (ExitCode.OK, ExitCode.BAD_ANSWER, ExitCode.ENVIRONMENT)
"""Exit codes of a pass that was finished; the last one if it was too noisy."""

_FAULTS: dict[int, type[SpecbenchError]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.ENVIRONMENT: EnvironmentFault,
}
"""What a pass that was not finished is to the run: whose fault it was, it has said itself."""


@dataclass(frozen=True)
class Result:
    """Where a run's records are, and what the program should exit with."""

    run_dir: Path
    exit_code: ExitCode


def start(
    config: RunConfig, sources: Mapping[str, str], out: Path | None, view: RunView
) -> tuple[Plan, RunDir]:
    """Plan a new run and make its folder; nothing is left behind where that cannot be done."""
    from specbench_cli.execute.bench import choose_device

    plan = make_plan(config)
    choose_device(config.device)
    view.planned(plan.facts())
    effective = _public(plan)
    path = out or new_path("-".join(effective["tasks"]), config.model_dump(mode="json"))
    run_dir = RunDir.create(path, _manifest(plan, effective, sources))
    (run_dir.path / _ORDER).write_text(config.model_dump_json(), encoding="utf-8")
    return plan, run_dir


def reopen(path: Path, view: RunView) -> tuple[Plan | None, RunDir]:
    """Plan the rest of a run; None if it is finished.

    Raises:
        UsageError: no run, one that cannot be resumed, or data that changed since.
    """
    run_dir = RunDir.open(path)
    if run_dir.manifest.get("status") == "finished":
        return None, run_dir
    try:
        order = (run_dir.path / _ORDER).read_text(encoding="utf-8")
        config = RunConfig.model_validate_json(order)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be resumed: its {_ORDER} is missing or damaged",
            hint=_ANEW,
        ) from error
    plan = make_plan(config)
    view.planned(plan.facts())
    for task, then in zip(plan.tasks, run_dir.manifest.get("tasks", []), strict=False):
        if task.sha256 != then["sha256"]:
            raise UsageError(
                f"the data of task {task.name} changed since {path} was begun", hint=_ANEW
            )
    for _ in run_dir.records():
        pass  # a damaged one is told before anything changes
    run_dir.resume()
    return plan, run_dir


def run(
    plan: Plan | None,
    run_dir: RunDir,
    view: RunView,
    *,
    only_pass: int | None = None,
    fresh: bool = False,
) -> Result:
    """Do what a run still lacks; without a plan, nothing.

    With several passes each runs in a fresh process; `only_pass` is what such a process is told.
    Interrupted or failing, the manifest says so, and everything settled until then is kept. A
    `fresh` run that fails before its first record could only fail again: its folder goes.
    """
    if plan is None:
        view.note(f"{run_dir.path} is finished: nothing is missing")
        return Result(run_dir.path, exit_code(list(run_dir.records()), run_dir.manifest))
    done = sum(1 for _ in run_dir.records())
    view.started(plan.cells, done, run_dir.path)
    try:
        if only_pass is not None:
            _run_passes(plan, run_dir, view, [only_pass])
        elif plan.config.repeats == 1:
            _run_passes(plan, run_dir, view, [1])
        else:
            for number in range(1, plan.config.repeats + 1):
                _spawn_pass(run_dir.path, number, view)
    except BaseException as fault:
        if fresh and isinstance(fault, SpecbenchError) and not any(run_dir.records()):
            (run_dir.path / _ORDER).unlink(missing_ok=True)
            run_dir.discard()
        else:
            RunDir.open(run_dir.path).close("interrupted")
        raise
    run_dir = RunDir.open(run_dir.path)
    records = list(run_dir.records())
    loud = plan.config.allow_noise and any(noisy(record.other_cpu) for record in records)
    if only_pass is None:
        run_dir.close("finished", finished_utc=_now(), noisy=loud)
        (run_dir.path / _ORDER).unlink(missing_ok=True)
    return Result(run_dir.path, exit_code(records, run_dir.manifest))


def exit_code(records: Sequence[Record], manifest: Mapping[str, Any]) -> ExitCode:
    """Bad if a row is broken or a cell failed; else a fault of the environment if too many times
    are void; else fine.

    Peers are measured, not judged: nothing they do makes an answer bad.
    """
    ours = [record for record in records if not record.peer]
    if any(record.error is not None for record in ours) or broken(ours, manifest):
        return ExitCode.BAD_ANSWER
    for label in {record.label for record in records}:
        void = [record.void for record in records if record.label == label]
        if sum(void) > VOID_SHARE * len(void):
            return ExitCode.ENVIRONMENT
    return ExitCode.OK


def _run_passes(plan: Plan, run_dir: RunDir, view: RunView, numbers: Sequence[int]) -> None:
    # Reading weights takes torch and seconds: nothing above needs it.
    from specbench_cli.execute.bench import Bench
    from specbench_cli.execute.passes import Answers, Pass

    bench = Bench(plan)
    bench.check_first_turns()
    models = bench.models()
    before = run_dir.manifest.get("models")
    if before and any(before[role]["sha256"] != models[role]["sha256"] for role in models):
        raise UsageError(f"the weights changed since {run_dir.path} was begun", hint=_ANEW)
    effective = {**run_dir.manifest["config"]["effective"], **bench.resolved()}
    run_dir.update(models=models, config={"effective": effective})
    pass_ = Pass(plan, bench, run_dir, Answers.read(run_dir), view)
    for number in numbers:
        pass_.run(number)
    run_dir.update(
        # The first pass that needed a tolerance measured it; one that needed none knows nothing.
        near_ties=run_dir.manifest.get("near_ties") or pass_.near_ties(),
        tolerance=pass_.judge.facts() or run_dir.manifest.get("tolerance"),
        memory={
            "weight_bytes": bench.workspace.weight_bytes,
            "state_bytes": bench.workspace.state_bytes,
        },
    )


def _spawn_pass(path: Path, number: int, view: RunView) -> None:
    # The process marks the run as running once it could plan it, and as interrupted if it failed.
    RunDir.open(path).close("interrupted")
    command = [sys.executable, "-m", "specbench_cli", "run", "--resume", str(path)]
    child = subprocess.run([*command, "--only-pass", str(number), *view.flags()], check=False)
    run_dir = RunDir.open(path)
    if child.returncode in _CONCLUDED and run_dir.manifest["status"] == "running":
        return
    fault = _FAULTS.get(child.returncode, SpecbenchError)
    raise fault(
        f"pass {number} was not finished: its process ended with exit code {child.returncode}",
        hint=f"specbench run --resume {path}" if any(run_dir.records()) else None,
    )


def _manifest(
    plan: Plan, effective: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "created_utc": _now(),
        "config": {"effective": dict(effective)},
        "config_sources": {key: Path(source).name for key, source in sources.items()},
        "machine": fingerprint(),
        "models": {},
        "method_files": {arm.name: arm.file_sha256 for arm in plan.arms},
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
        "noisy": False,
        "tolerance": None,
        "near_ties": None,
        "aa_noise": None,
    }


def _public(plan: Plan) -> dict[str, Any]:
    """The configuration with names in place of paths."""
    return {
        **plan.config.model_dump(mode="json"),
        "target": plan.target.label,
        "draft": plan.draft.label if plan.draft else None,
        "tasks": [task.name for task in plan.tasks],
        "plugins": [Path(path).name for path in plan.config.plugins],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
