"""Scheduling: the driver assigns questions to the workers of a cluster and stores their records.

One worker measures all methods on a question, vanilla included. The records of an assignment are
stored together. If a worker is lost, no assignment is half stored, and its questions go to another
worker.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from specbench_cli import __version__
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError, WorkerLost
from specbench_cli.measure.cluster.worker import (
    AssignmentResult,
    LoadedModels,
    WorkerInfo,
    WorkerResult,
    shared_facts,
)
from specbench_cli.measure.manifest import is_machine_key
from specbench_cli.measure.record_builder import has_near_tie
from specbench_cli.measure.repeat_process import resume_command
from specbench_cli.measure.run_checks import list_differences
from specbench_cli.measure.stored_outputs import StoredOutputs
from specbench_cli.measure.view import PromptProgress, RunView
from specbench_cli.plan.plan import Plan, prompts_per_batch
from specbench_cli.store.run_dir import RunDir

MAX_LOST_WORKERS = 3
"""Number of workers lost over one assignment after which the run stops, because it may be the
cause."""

_SETUP_HINT = (
    f"have the same there, in the Python of its Ray: pip install specbench-cli=={__version__}, the"
    " same packages, data and weights; or end that node: ray stop"
)

_DIFFERENCE = "{} ({}, there {})"
_PER_WORKER_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that differs between the workers of a machine."""


class Workers(Protocol):
    """The workers of a cluster. Each runs one order at a time, like a `WorkerProcess`."""

    def start(self, names: Iterable[str], plan: Plan, folder: Path) -> Mapping[str, str]:
        """Start a worker for each device of the cluster.

        Args:
            names: Names of the workers, as many as needed.
            folder: Folder to which paths in the configuration are relative.

        Returns:
            A description of each worker's device.

        Raises:
            EnvironmentFault: there is no such device.
        """

    def send(self, name: str, what: str, *args: Any) -> None:
        """Send an order to a worker: the name of a method of `ClusterWorker`."""

    def receive(self) -> tuple[str, Any]:
        """Wait for a worker. Return its name and its result or exception; a lost one returns
        WorkerLost."""

    def end(self, name: str) -> None:
        """End a worker."""


class Scheduler:
    """Scheduler of one repeat of a run on fresh workers.

    Args:
        plan: The plan of the run.
        run_dir: Folder of the run. Only the driver writes to it.
        view: Display of progress and notes.
        workers: The workers, not started yet.
        number: Number of the repeat.
        check: Raises an error if models or heads differ from those at the start of the run.
        force: Continue even if the machines differ from those at the start of the run.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        view: RunView,
        workers: Workers,
        number: int,
        *,
        check: Callable[[Mapping[str, Mapping[str, Any]]], object],
        force: bool,
    ) -> None:
        self._plan, self._run_dir, self._view, self._workers = plan, run_dir, view, workers
        self._number, self._check, self._force = number, check, force
        self._stored_outputs = StoredOutputs.read(run_dir)
        self._devices: dict[str, str] = {}
        self._judged: set[str] = set()
        self._finished: set[str] = set()  # workers that dropped all methods except vanilla
        repeats = plan.config.repeats
        self._part_name = f"pass {number} of {repeats}" if repeats > 1 else ""

    @property
    def is_over(self) -> bool:
        """Return True if vanilla is the only method left on every worker."""
        return bool(self._finished) and self._devices.keys() <= self._finished

    def run(self) -> None:
        """Measure the missing questions of the repeat on the workers, and store their records.

        Raises:
            EnvironmentFault: no device, or a worker that differs from the driver or other workers.
            WorkerLost: no worker is left, or one assignment ended too many of them.
        """
        self._view.stage("starting workers")
        before = len(self._run_dir.manifest.get("workers") or {})
        self._devices = {**self._workers.start(map(str, count(before + 1)), self._plan, Path.cwd())}
        self._check_workers()
        self._load()
        self._assign_questions()
        self._finish()

    def _check_workers(self) -> None:
        """Check that every worker can measure this run."""
        infos: dict[str, WorkerInfo] = self._call_workers("plan_run", starting=True)
        ours = shared_facts(self._plan)
        for name, own in infos.items():
            if other := list_differences(ours, own.shared_facts, _DIFFERENCE):
                raise EnvironmentFault(
                    f"worker {name} ({self._devices[name]}) has something else than the driver:"
                    f" {', '.join(other)}",
                    hint=_SETUP_HINT,
                )
        first, *others = infos
        common = _without_worker_variables(infos[first].machine_facts)
        for name in others:
            if other := list_differences(
                common, _without_worker_variables(infos[name].machine_facts), _DIFFERENCE
            ):
                raise EnvironmentFault(
                    f"worker {name} ({self._devices[name]}) is of another kind than worker {first}"
                    f" ({self._devices[first]}): {', '.join(other)}; a run measures one kind",
                    hint="restart the others without devices: ray start --num-cpus=0 --num-gpus=0",
                )
        program = self._run_dir.manifest["program"]
        then = {key: word for key, word in program.items() if is_machine_key(key)}
        if then and (other := list_differences(then, common, _DIFFERENCE)):
            if not self._force:
                raise UsageError(
                    f"{self._run_dir.path} was begun on other machines: {', '.join(other)}",
                    hint="begin a new run: specbench run; or go on and label the run:"
                    f" {resume_command(self._run_dir.path)} --force",
                )
            mixed = [*(self._run_dir.manifest.get("mixed") or []), *other]
            self._run_dir.update(mixed=mixed)
        kept = {key: word for key, word in program.items() if not is_machine_key(key)}
        self._run_dir.update(machine={**infos[first].machine}, program={**kept, **common})

    def _load(self) -> None:
        """Load the models on all workers. All of them use the costs of the first one."""
        labels = ", ".join(each.label for each in self._plan.checkpoints.values())
        self._view.stage(f"loading {labels} in {_pluralize(self._devices, 'worker')}")
        first, *others = self._devices
        costs = self._run_dir.manifest.get("step_costs")
        found: dict[str, LoadedModels] = self._call_workers(
            "load", costs, names=[first], starting=True
        )
        first_loaded = found[first]
        self._check({**first_loaded.models, **first_loaded.heads})
        found |= self._call_workers("load", first_loaded.step_costs, names=others, starting=True)
        manifest = self._run_dir.manifest
        effective = manifest["config"]["effective"] | first_loaded.resolved
        workers = {name: {"device": own.resolved["device"]} for name, own in found.items()}
        self._run_dir.update(
            models=first_loaded.models,
            heads=first_loaded.heads,
            config={"effective": effective},
            step_costs=first_loaded.step_costs,
            workers={**(manifest.get("workers") or {}), **workers},
        )

    def _assign_questions(self) -> None:
        """Assign questions to workers until none is missing."""
        schedule = [
            question.prompt_id
            for question, method_runs in self._plan.schedule(self._number)
            if self._stored_outputs.lacks_output(question, method_runs, self._number)
        ]
        size = prompts_per_batch(self._plan.config.batch)
        todo = deque(tuple(schedule[at : at + size]) for at in range(0, len(schedule), size))
        every = len(self._plan.questions)
        done = measured = every - len(schedule)
        at: dict[str, tuple[str, ...]] = {}
        losses = Counter[tuple[str, ...]]()
        began = time.monotonic()
        while todo or at:
            busy = at.keys() | self._finished
            for name in [name for name in self._devices if name not in busy][: len(todo)]:
                at[name] = todo.popleft()
                known = self._stored_outputs.select(at[name])
                self._workers.send(name, "measure", self._number, at[name], known)
            if not at and self._finished:
                self._view.note("only vanilla is left: the run ends")
                break
            if not at:
                raise WorkerLost(
                    f"no worker is left, and {_pluralize(todo, 'deal')} of questions not measured",
                    hint=resume_command(self._run_dir.path),
                )
            name, result = self._receive()
            assignment = at.pop(name)
            if isinstance(result, AssignmentResult) and result.lost is None:
                self._store(name, result)
                measured += len(assignment)
                later = (self._plan.config.repeats - self._number) * every
                rest = every - measured + later
                spent = (time.monotonic() - began) / (measured - done)
                left = rest * spent if rest else None
                self._view.prompt(PromptProgress(self._part_name, measured, every, left))
                continue
            why = result.lost if isinstance(result, AssignmentResult) else result.message
            self._drop_worker(name, f"{why}; {', '.join(assignment)} goes to another")
            todo.appendleft(assignment)
            losses[assignment] += 1
            if losses[assignment] == MAX_LOST_WORKERS:
                raise WorkerLost(
                    f"{', '.join(assignment)}: {MAX_LOST_WORKERS} workers were lost over it, the"
                    f" last: {why}",
                    hint=f"leave the question out, or the row that ends them; else"
                    f" {resume_command(self._run_dir.path)}",
                )

    def _store(self, name: str, result: AssignmentResult) -> None:
        """Store the result of an assignment."""
        for note in result.notes:
            self._view.note(f"worker {name}: {note}")
        if result.prompts:
            self._run_dir.append_prompts(result.prompts)
        self._stored_outputs.prompts |= {
            (each.prompt_id, each.turn): each for each in result.prompts
        }
        missing = [
            record for record in result.records if record.key not in self._stored_outputs.done
        ]
        for record in missing:
            record.worker = name
        self._run_dir.append(missing)
        for record in missing:
            self._stored_outputs.add(record.key, record.output_ids)
            self._view.show_record(record)
        dropped = self._run_dir.manifest.get("dropped") or {}
        if self._plan.is_over(result.dropped):
            self._finished.add(name)
        if not result.dropped.keys() <= dropped.keys():
            self._run_dir.update(dropped={**result.dropped, **dropped})
        if result.judged:
            self._judged.add(name)

    def _finish(self) -> None:
        """Let the workers check for leaks, and one of them find near-ties."""
        self._view.stage("decoding first prompts once more")
        found: list[WorkerResult] = list(self._call_workers("check_leaks").values())
        manifest = self._run_dir.manifest
        leaks = {label: at for own in found for label, at in own.leaks.items()}
        tolerances = [own.tolerance for own in found if own.tolerance]
        largest = max((own.memory for own in found), key=lambda m: m["state_bytes"], default=None)
        near = manifest.get("near_ties")
        if near is None and has_near_tie(self._run_dir.records()):
            self._view.stage("looking for near-ties")
            # Prefer workers that judged an output: one of them has measured the tolerance.
            for name in sorted(self._devices, key=lambda name: name not in self._judged):
                reply = self._call_workers("find_near_ties", self._stored_outputs, names=[name])
                if name in reply:
                    near = reply[name]
                    break
        self._run_dir.update(
            leaks={**(manifest.get("leaks") or {}), **leaks},
            tolerance=manifest.get("tolerance") or next(iter(tolerances), None),
            near_ties=near,
            memory=largest or manifest.get("memory"),
        )
        self._call_workers("close")

    def _call_workers(
        self, order: str, *args: Any, names: Sequence[str] | None = None, starting: bool = False
    ) -> dict[str, Any]:
        """Send an order to workers and return their results. Lost workers are left out.

        Args:
            of: Names of the workers. None sends it to all.
            starting: True raises EnvironmentFault for a lost worker.
        """
        asked = [*self._devices] if names is None else names
        for name in asked:
            self._workers.send(name, order, *args)
        found = {}
        for _ in asked:
            name, reply = self._receive()
            if not isinstance(reply, WorkerLost):
                found[name] = reply
            elif starting:
                raise EnvironmentFault(
                    f"worker {name} ({self._devices[name]}) did not start: {reply.message}",
                    hint=reply.hint or _SETUP_HINT,
                )
            else:
                self._drop_worker(name, reply.message)
        return {name: found[name] for name in asked if name in found}

    def _receive(self) -> tuple[str, Any]:
        """Return the next result of a worker. Raise its error, with the worker's name."""
        name, reply = self._workers.receive()
        if isinstance(reply, SpecbenchError) and not isinstance(reply, WorkerLost):
            message = f"worker {name} ({self._devices[name]}): {reply.message}"
            raise type(reply)(message, reply.hint) from reply
        if isinstance(reply, BaseException) and not isinstance(reply, WorkerLost):
            raise reply
        return name, reply

    def _drop_worker(self, name: str, why: str) -> None:
        """Remove a lost worker and note it."""
        where = self._devices.pop(name)
        self._view.note(f"worker {name} ({where}) was lost: {why}")
        self._workers.end(name)
        workers = self._run_dir.manifest["workers"]
        lost = why.partition(";")[0]
        self._run_dir.update(workers={**workers, name: {**workers[name], "lost": lost}})


def _without_worker_variables(machine_facts: Mapping[str, str]) -> dict[str, str]:
    return {
        key: word
        for key, word in machine_facts.items()
        if key != f"variable {_PER_WORKER_VARIABLE}"
    }


def _pluralize(things: Any, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
