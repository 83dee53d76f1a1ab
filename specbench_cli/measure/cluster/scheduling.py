"""Scheduling of a run on a cluster: the driver assigns questions to workers and stores the results.

The driver is the process that the user started. An assignment is one question, or one batch of
questions. One worker measures all methods, including vanilla, on an assignment. The driver stores
the records of an assignment together. If a worker is lost, another worker repeats its assignment.
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
"""Number of lost workers after which the run stops if all had the same assignment, because the
assignment may be the cause."""

_SETUP_HINT = (
    "install the same in the Python environment of Ray on that node: pip install"
    f" specbench-cli=={__version__}, the same packages, data and weights; or stop the node: ray"
    " stop"
)

_DIFFERENCE = "{} ({}, there {})"
_PER_WORKER_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that differs between the workers of one machine, so it is not compared."""


class Workers(Protocol):
    """Interface of the workers of a cluster, as the driver uses them.

    The driver sends orders to workers. An order is the name of a method of `ClusterWorker`, with
    arguments. A worker executes one order at a time.
    """

    def start(self, names: Iterable[str], plan: Plan, folder: Path) -> Mapping[str, str]:
        """Start one worker for each device of the cluster.

        Args:
            names: Names for the workers. There may be more names than devices.
            plan: Plan of the run.
            folder: Folder to which paths in the configuration are relative.

        Returns:
            Name of each worker -> description of its device.

        Raises:
            EnvironmentFault: the cluster does not have the configured device.
        """

    def send(self, name: str, what: str, *args: Any) -> None:
        """Send an order to a worker.

        Args:
            name: Name of the worker.
            what: The order, which is the name of a method of `ClusterWorker`.
            args: Arguments of this method.
        """

    def receive(self) -> tuple[str, Any]:
        """Wait until any worker has executed its order.

        Return the worker's name, and its result or exception. For a lost worker, the exception is
        WorkerLost.
        """

    def end(self, name: str) -> None:
        """End a worker."""


class Scheduler:
    """Scheduler of one repeat of a run on the workers of a cluster.

    Args:
        plan: The plan of the run.
        run_dir: Folder of the run. Only the driver writes to it.
        view: Display of progress and notes.
        workers: The workers. `run` starts them.
        number: Number of the repeat.
        check: Function that compares the models and heads of the workers with those at the start of
            the run. It raises an error if they differ.
        force: True continues a run even if it started on different machines.
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
        # Names of workers on which all methods except vanilla failed repeatedly. They get no more
        # questions.
        self._finished: set[str] = set()
        repeats = plan.config.repeats
        self._part_name = f"pass {number} of {repeats}" if repeats > 1 else ""

    @property
    def is_over(self) -> bool:
        """True if vanilla is the only method that each worker still measures."""
        return bool(self._finished) and self._devices.keys() <= self._finished

    def run(self) -> None:
        """Measure the missing questions of the repeat on the workers, and store their records.

        Raises:
            EnvironmentFault: there is no device, or a worker has other software, data or hardware
                than the driver or the other workers.
            WorkerLost: no worker is left, or too many workers were lost while they measured the
                same assignment.
        """
        self._view.stage("starting workers")
        before = len(self._run_dir.manifest.get("workers") or {})
        self._devices = {**self._workers.start(map(str, count(before + 1)), self._plan, Path.cwd())}
        self._check_workers()
        self._load()
        self._assign_questions()
        self._finish()

    def _check_workers(self) -> None:
        """Check that every worker has the same software, data, weights and hardware.

        Raises:
            EnvironmentFault: a worker differs from the driver or from the first worker.
            UsageError: the machines differ from those at the start of a resumed run.
        """
        infos: dict[str, WorkerInfo] = self._call_workers("plan_run", starting=True)
        ours = shared_facts(self._plan)
        for name, own in infos.items():
            if other := list_differences(ours, own.shared_facts, _DIFFERENCE):
                raise EnvironmentFault(
                    f"worker {name} ({self._devices[name]}) differs from the driver:"
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
                    f"worker {name} ({self._devices[name]}) differs from worker {first}"
                    f" ({self._devices[first]}): {', '.join(other)}; all workers of a run must be"
                    " alike",
                    hint="restart the other nodes without devices: ray start --num-cpus=0"
                    " --num-gpus=0",
                )
        program = self._run_dir.manifest["program"]
        then = {key: word for key, word in program.items() if is_machine_key(key)}
        if then and (other := list_differences(then, common, _DIFFERENCE)):
            if not self._force:
                raise UsageError(
                    f"{self._run_dir.path} was started on other machines: {', '.join(other)}",
                    hint="start a new run: specbench run; or continue and label the run as mixed:"
                    f" {resume_command(self._run_dir.path)} --force",
                )
            mixed = [*(self._run_dir.manifest.get("mixed") or []), *other]
            self._run_dir.update(mixed=mixed)
        unchanged = {key: word for key, word in program.items() if not is_machine_key(key)}
        self._run_dir.update(machine={**infos[first].machine}, program={**unchanged, **common})

    def _load(self) -> None:
        """Load the models on all workers.

        If a method needs the costs of forwards, the first worker measures them. All other workers
        use the same costs.
        """
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
        """Assign the missing questions to the workers, and store the results."""
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
                    "no worker is left, and some questions are not measured"
                    f" ({_pluralize(todo, 'assignment')})",
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
            self._drop_worker(name, f"{why}; {', '.join(assignment)} goes to another worker")
            todo.appendleft(assignment)
            losses[assignment] += 1
            if losses[assignment] == MAX_LOST_WORKERS:
                raise WorkerLost(
                    f"{', '.join(assignment)}: {MAX_LOST_WORKERS} workers were lost while they"
                    f" measured it, the last: {why}",
                    hint="leave out the question, or the method that ends the workers; to retry:"
                    f" {resume_command(self._run_dir.path)}",
                )

    def _store(self, name: str, result: AssignmentResult) -> None:
        """Store the prompts and records of an assignment, and show its notes.

        Args:
            name: Name of the worker.
        """
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
        """Let the workers run the checks at the end of a repeat, and store the results.

        Every worker decodes its first questions again, to find methods that keep state
        (`Repeat.check_leaks`). If an output is a near-tie, one worker also computes where near-ties
        are possible.
        """
        self._view.stage("decoding first prompts once more")
        found: list[WorkerResult] = list(self._call_workers("check_leaks").values())
        manifest = self._run_dir.manifest
        leaks = {label: at for own in found for label, at in own.leaks.items()}
        tolerances = [own.tolerance for own in found if own.tolerance]
        largest = max((own.memory for own in found), key=lambda m: m["state_bytes"], default=None)
        near = manifest.get("near_ties")
        if near is None and has_near_tie(self._run_dir.records()):
            self._view.stage("looking for near-ties")
            # Prefer a worker that has judged outputs, because it may already know the tolerance of
            # near-ties.
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
        """Send an order to workers and return the result of each worker.

        Lost workers return no result.

        Args:
            order: Name of a method of `ClusterWorker`, with its arguments in `args`.
            names: Names of the workers. None sends the order to all workers.
            starting: True raises EnvironmentFault if a worker is lost.
        """
        receivers = [*self._devices] if names is None else names
        for name in receivers:
            self._workers.send(name, order, *args)
        found = {}
        for _ in receivers:
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
        return {name: found[name] for name in receivers if name in found}

    def _receive(self) -> tuple[str, Any]:
        """Wait for the next reply of any worker. Return the worker's name and its result.

        If the worker raised an exception, raise it. If the worker is lost, return WorkerLost as the
        result.
        """
        name, reply = self._workers.receive()
        if isinstance(reply, SpecbenchError) and not isinstance(reply, WorkerLost):
            message = f"worker {name} ({self._devices[name]}): {reply.message}"
            raise type(reply)(message, reply.hint) from reply
        if isinstance(reply, BaseException) and not isinstance(reply, WorkerLost):
            raise reply
        return name, reply

    def _drop_worker(self, name: str, why: str) -> None:
        """End a lost worker, show a note, and store the reason in the manifest."""
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
