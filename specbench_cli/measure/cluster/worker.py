"""A cluster worker: a process on one device that measures all methods on its assigned questions."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.models.checkpoint import Weights, read_checkpoint_facts
from specbench_cli.measure.bench import Bench, read_checkpoint
from specbench_cli.measure.isolation.plugin_methods import PluginMethods
from specbench_cli.measure.isolation.plugin_process import check_plugins, end_plugin_processes
from specbench_cli.measure.machine import fingerprint
from specbench_cli.measure.manifest import build_manifest, machine_facts, program_facts
from specbench_cli.measure.method_costs import provide_costs
from specbench_cli.measure.repeat import Repeat
from specbench_cli.measure.stored_outputs import StoredOutputs
from specbench_cli.models.heads import resolve_head
from specbench_cli.plan.plan import Plan, make_plan
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import Record


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker's software and machine, which the driver checks.

    shared_facts: Result of `shared_facts`. The driver must have the same facts.
    machine_facts: Result of `manifest.machine_facts`. It must be the same on all workers.
    machine: Fingerprint of the machine (`machine.fingerprint`).
    """

    shared_facts: Mapping[str, str]
    machine_facts: Mapping[str, str]
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class LoadedModels:
    """Manifest entries of a worker's loaded models, heads and settings, see `Bench`.

    step_costs: Measured times of forwards (`StepCosts`). None if no method needs them.
    """

    models: Mapping[str, Any]
    heads: Mapping[str, Any]
    resolved: Mapping[str, Any]
    step_costs: Mapping[str, Any] | None


@dataclass(frozen=True)
class AssignmentResult:
    """Result of an assignment: the measured records and new prompts.

    notes: Notes for the user.
    dropped: Methods that have failed repeatedly on this worker -> the reason.
    lost: Error message if a process of the worker ended, so that records are missing. Else None.
    judged: True if this worker has measured an output that differs from vanilla's output.
    """

    records: list[Record]
    prompts: list[Prompt]
    notes: list[str]
    dropped: Mapping[str, str]
    lost: str | None
    judged: bool


@dataclass(frozen=True)
class WorkerResult:
    """Manifest entries that a worker returns at the end of a repeat.

    leaks: Methods that keep state from earlier prompts, see `Repeat.check_leaks`.
    tolerance: Tolerance of near-ties. None if it was not measured.
    memory: Memory of weights and model states, see `Bench.memory_entry`.
    """

    leaks: Mapping[str, str]
    tolerance: Mapping[str, Any] | None
    memory: Mapping[str, Any]


class ClusterWorker:
    """Worker on one device of a cluster. Its methods are the orders that the driver can send.

    A worker writes to its own temporary run folder. The driver stores the records in the real one.

    Args:
        order: Configuration of the run as JSON.
        folder: Folder to which paths in the configuration are relative.
    """

    def __init__(self, order: str, folder: str) -> None:
        with suppress(OSError):  # the folder may exist on the driver's machine only
            os.chdir(folder)
        self._order = order
        self._home = TemporaryDirectory(prefix="specbench-worker-")
        self._stored_outputs, self._progress = StoredOutputs(), WorkerProgress()
        self._assignments = 0

    def plan_run(self) -> WorkerInfo:
        """Plan the run on this machine. Raise the errors of `make_plan`."""
        config = RunConfig.model_validate_json(self._order)
        check_plugins(config)
        self._plan = make_plan(config)
        return WorkerInfo(shared_facts(self._plan), machine_facts(), fingerprint())

    def load(self, costs: Mapping[str, Any] | None) -> LoadedModels:
        """Load the models and return their manifest entries.

        Args:
            costs: Measured times of forwards. If None, and a method uses them, they are measured.

        Raises:
            UsageError, EnvironmentFault: a model cannot be loaded, or a prompt is too long.
        """
        new_manifest = {**build_manifest(self._plan, {}), "step_costs": costs}
        self._run_dir = RunDir.create(Path(self._home.name) / "run", new_manifest)
        self._bench = Bench(self._plan)
        self._bench.check_first_turns()
        provide_costs(self._plan, self._bench, self._run_dir)
        resolved = self._bench.resolved_config()
        plugins = PluginMethods(self._plan, self._run_dir, resolved["threads"])
        for fault in plugins.load_errors.values():
            raise fault
        self._repeat = Repeat(
            self._plan,
            self._bench,
            self._run_dir,
            self._stored_outputs,
            self._progress,
            plugins=plugins,
        )
        return LoadedModels(
            self._bench.model_entries(),
            {**self._bench.head_entries(), **plugins.heads},
            {**resolved, "devices": self._bench.devices},
            self._run_dir.manifest["step_costs"],
        )

    def measure(
        self, number: int, names: Collection[str], known: StoredOutputs
    ) -> AssignmentResult:
        """Measure questions of a repeat.

        Args:
            number: Number of the repeat.
            names: Prompt ids of the questions.
            known: Outputs of these questions that are already stored.
        """
        self._stored_outputs.update(known)
        self._progress.records, self._progress.notes = [], []
        self._assignments += 1
        self._repeat.run_questions(number, names)
        lost = next(iter(self._repeat.left_out.values()), None)
        prompts = self._stored_outputs.select(names).prompts
        return AssignmentResult(
            self._progress.records,
            [prompts[key] for key in sorted(prompts.keys() - known.prompts.keys())],
            self._progress.notes,
            self._run_dir.manifest["dropped"],
            None if lost is None else lost.message,
            self._repeat.judge.was_needed,
        )

    def check_leaks(self) -> WorkerResult:
        """Decode the first questions of this worker again.

        Return the worker's last manifest entries.
        """
        if self._assignments > 1:
            self._repeat.check_leaks()
        return WorkerResult(
            self._run_dir.manifest["leaks"], self._repeat.judge.facts(), self._bench.memory_entry()
        )

    def find_near_ties(self, known: StoredOutputs) -> Mapping[str, Any] | None:
        """Return where near-ties are possible, see `record_builder.find_near_ties`.

        Args:
            known: All stored outputs of the run.
        """
        self._stored_outputs.update(known)
        return self._repeat.find_near_ties(needed=True)

    def close(self) -> None:
        """End the processes of this worker and remove its temporary folder."""
        self._bench.close()
        end_plugin_processes()
        self._home.cleanup()


class WorkerProgress:
    """Implementation of `RunView` for a worker. It displays nothing.

    It collects records and notes, which the worker sends to the driver.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.notes: list[str] = []

    def show_record(self, record: Record) -> None:
        """Collect a record."""
        self.records.append(record)

    def note(self, text: str) -> None:
        """Collect a note for the user."""
        self.notes.append(text)

    def flags(self) -> list[str]:
        """Return an empty list of command-line options, because nothing is displayed."""
        return []

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Ignore any other call of the interface `RunView`."""

    planned = started = stage = prompt = window = hand_over = _ignore


def shared_facts(plan: Plan) -> dict[str, str]:
    """Return facts that must be equal on the driver and all workers.

    These are the software, settings, data and weights.
    """
    models = {
        each.label: read_checkpoint(read_checkpoint_facts, each).sha256
        for each in plan.checkpoints.values()
    }
    heads = {}
    for wanted in (
        wanted for method_run in plan.method_runs for wanted in method_run.method.artifacts()
    ):
        kind = wanted.kind
        files = resolve_head(
            wanted.source, kind.kind, plan.target, in_target=kind.inside, hint=kind.hint
        )
        heads[f"{kind.kind} {files.label}"] = Weights(files.path).sha256()
    weights = {f"the weights of {name}": sha[:12] for name, sha in (models | heads).items()}
    return program_facts(plan) | weights
