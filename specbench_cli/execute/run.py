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
from specbench_cli.errors import ExitCode, SpecbenchError, UsageError
from specbench_cli.execute.plan import Plan, make_plan
from specbench_cli.execute.view import RunView
from specbench_cli.execute.window import noisy
from specbench_cli.measure.machine import fingerprint
from specbench_cli.store.run_dir import RunDir, new_path
from specbench_cli.store.schema import SCHEMA, Record

VOID_SHARE = 0.1  # a row that lost more of its cells to noise has no speedup

_ORDER = ".resume.json"
"""What was ordered, word for word: it may name folders of this machine, so it is not part of the
result and goes once the run is finished."""


@dataclass(frozen=True)
class Result:
    """Where a run's records are, and what the program should exit with."""

    run_dir: Path
    exit_code: ExitCode


def start(
    config: RunConfig, sources: Mapping[str, str], out: Path | None, view: RunView
) -> tuple[Plan, RunDir]:
    """Plan a new run and make its folder."""
    plan = make_plan(config)
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
            f"{path} cannot be resumed: its {_ORDER} is missing or damaged", hint="specbench run"
        ) from error
    plan = make_plan(config)
    view.planned(plan.facts())
    for task, then in zip(plan.tasks, run_dir.manifest.get("tasks", []), strict=False):
        if task.sha256 != then["sha256"]:
            raise UsageError(
                f"the data of task {task.name} changed since {path} was begun", hint="specbench run"
            )
    run_dir.resume()
    return plan, run_dir


def run(
    plan: Plan | None, run_dir: RunDir, view: RunView, *, only_pass: int | None = None
) -> Result:
    """Do what a run still lacks; without a plan, nothing.

    With several passes each runs in a fresh process; `only_pass` is what such a process is told.
    Interrupted or failing, the manifest says so, and everything settled until then is kept.
    """
    if plan is None:
        view.note(f"{run_dir.path} is finished: nothing is missing")
        return Result(run_dir.path, exit_code(list(run_dir.records())))
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
    except BaseException:
        RunDir.open(run_dir.path).close("interrupted")
        raise
    run_dir = RunDir.open(run_dir.path)
    records = list(run_dir.records())
    loud = plan.config.allow_noise and any(noisy(record.other_cpu) for record in records)
    if only_pass is None:
        run_dir.close("finished", finished_utc=_now(), noisy=loud)
        (run_dir.path / _ORDER).unlink(missing_ok=True)
    return Result(run_dir.path, exit_code(records))


def exit_code(records: Sequence[Record]) -> ExitCode:
    """Bad if an output is; else a fault of the environment if too many times are void; else fine.

    Peers are measured, not judged: nothing they do makes an answer bad.
    """
    ours = [record for record in records if not record.peer]
    if any(r.error is not None or (r.verdict and r.verdict.kind == "mismatch") for r in ours):
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
    models = bench.models()
    before = run_dir.manifest.get("models")
    if before and any(before[role]["sha256"] != models[role]["sha256"] for role in models):
        raise UsageError(
            f"the weights changed since {run_dir.path} was begun", hint="specbench run"
        )
    effective = {**run_dir.manifest["config"]["effective"], **bench.resolved()}
    run_dir.update(models=models, config={"effective": effective})
    pass_ = Pass(plan, bench, run_dir, Answers.read(run_dir), view)
    for number in numbers:
        pass_.run(number)
    run_dir.update(
        # The first pass that needed a tolerance measured it; one that needed none knows nothing.
        tolerance=pass_.judge.facts() or run_dir.manifest.get("tolerance"),
        memory={
            "weight_bytes": bench.workspace.weight_bytes,
            "state_bytes": bench.workspace.state_bytes,
        },
    )


def _spawn_pass(path: Path, number: int, view: RunView) -> None:
    command = [sys.executable, "-m", "specbench_cli", "run", "--resume", str(path)]
    child = subprocess.run([*command, "--only-pass", str(number), *view.flags()], check=False)
    if child.returncode not in (ExitCode.OK, ExitCode.BAD_ANSWER, ExitCode.ENVIRONMENT):
        raise SpecbenchError(
            f"the process of pass {number} ended with exit code {child.returncode}",
            hint=f"specbench run --resume {path}",
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
