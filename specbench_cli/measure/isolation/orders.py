"""Code that runs in a plug-in process. It imports a plug-in and decodes with the plug-in's methods.

The main process of the run sends orders. Each order is the name of a method of `PluginOrders`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import psutil

from specbench_cli import registry
from specbench_cli.config import plugin_file
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.verify.hooks import check_return
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.process_lifetime import exit_with_parent
from specbench_cli.errors import MethodFault, SpecbenchError
from specbench_cli.measure import worker_process
from specbench_cli.measure.batch_measurement import make_measurable
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.isolation import replies, state
from specbench_cli.measure.isolation.replies import MeasurementReply
from specbench_cli.measure.measurement import LearningDelay, Measurement
from specbench_cli.measure.method_code import describe_failure
from specbench_cli.measure.step_costs import StepCosts
from specbench_cli.measure.warm_up import WARM_UP_ROUNDS, WARM_UP_TOKENS, warm_up
from specbench_cli.models.resolve import Checkpoint
from specbench_cli.plan.grammar import Grammar
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import Prompt

MAX_MEMORY_SHARE = 0.9
"""Share of the machine's free memory that a plug-in process may use."""


@dataclass(frozen=True)
class LoadOrder:
    """Arguments of the order `PluginOrders.load_models`.

    target, draft, others: Checkpoints of the models.
    costs: Measured times of forwards (`StepCosts`). None if no method needs them.
    methods: (name, label, parameters) of each method.
    """

    config: RunConfig
    target: Checkpoint
    draft: Checkpoint | None
    others: dict[str, Checkpoint]
    costs: dict[str, Any] | None
    methods: tuple[tuple[str, str, dict[str, Any]], ...]
    grammar: Grammar | None = None


@dataclass(frozen=True)
class MeasurementOrder:
    """Arguments of the order to measure one output.

    They are some of the arguments of `Measurement`.

    budget: Maximum number of new tokens.
    pass_: Number of the repeat.
    previous_delay_ns: Time in ns that learning from the previous prompt delayed this prompt.
    """

    prompt: Prompt
    budget: int
    pass_: int
    recording: list[int] | None
    reference: list[int] | None
    keeps_drafts: bool
    previous_delay_ns: int

    @property
    def key(self) -> tuple[str, int, int]:
        """Prompt id, turn and repeat, which identify an output of a method."""
        return self.prompt.prompt_id, self.prompt.turn, self.pass_


@dataclass
class PluginOrders:
    """State of a plug-in process. Each method is an order that the run can send.

    method_runs: The methods of the plug-in, by label.
    memory: Data that each method has learned from earlier prompts, by label.
    measurements: Measured outputs. They are measured again if the machine was noisy.
    code_snapshot: State of the code that a method must not change (`state.CODE`).
    """

    bench: Bench = field(init=False)
    sampling: Sampling = field(init=False)
    method_runs: dict[str, MethodRun] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    measurements: dict[tuple[Any, ...], Measurement] = field(default_factory=dict)
    code_snapshot: state.StateSnapshot = field(default_factory=dict)

    def import_plugin(self, file: str | None, contents: Mapping[Path, bytes]) -> list[str]:
        """Import the plug-in. Return the names of process-wide state that the import changed.

        Args:
            file: The plug-in file. None imports the installed plug-ins.
            contents: Path of each plug-in file -> its content when the run checked it. This content
                is imported, even if the file has changed since.
        """
        before = state.capture_state()
        plugin_file.pin_all(contents)
        if file is not None:
            registry.load_plugin(file)
        return state.find_changes(before)

    def check_methods(self, rows: Sequence[MethodChoice]) -> list[str]:
        """Create the methods of the plug-in, and read all properties that the methods declare.

        Return the names of process-wide state that this code of the plug-in changed.
        """
        before = state.capture_state()
        for row in rows:
            method_run = MethodRun(row.name, row.label, row.params)
            for name in ("guarantees", "source", "file_sha256"):
                getattr(method_run, name)
            for name in _PROPERTIES:
                getattr(method_run.method, name)
            method_run.method.check()
            check_return(
                method_run.method,
                "processes",
                method_run.method.processes(),
                Sequence,
                "a list of ids",
            )
            method_run.check_hooks()
        return state.find_changes(before)

    def load_models(self, order: LoadOrder) -> dict[str, Any]:
        """Load the models. Return the manifest entries of the methods' trained modules."""
        config = order.config.model_copy(update={"isolation": "none"})  # already isolated
        self.method_runs = {
            label: MethodRun(name, label, passed) for name, label, passed in order.methods
        }
        models = order.target, order.draft, order.others
        method_runs = tuple(self.method_runs.values())
        plan = Plan(config, method_runs, (), (), *models, grammar=order.grammar)
        self.bench = Bench(plan)
        if order.costs is not None:
            self.bench.workspace.costs = cache(StepCosts.model_validate(order.costs))
        self.sampling = replace(plan.sampling, processor=self.bench.processor)
        _limit_memory()
        self.code_snapshot = state.capture_state(state.CODE)
        return self.bench.head_entries()

    def warm_up(self, label: str, ids: Sequence[int], capacity: int) -> str | None:
        """Decode a prompt with a method to warm it up, at the start of a repeat.

        Args:
            label: Label of the method.
            ids: Token ids of the prompt.
            capacity: Number of tokens for which the model states are allocated.

        Returns:
            The error if the method failed, else None.
        """
        self.bench.workspace.reserve(capacity)
        memory = self.memory[label] = Memory()
        fresh = Memory().save()
        request = self.bench.create_request("warm-up", 1, ids, self.bench.stop_rule(WARM_UP_TOKENS))
        try:
            for _ in range(WARM_UP_ROUNDS):
                warm_up(
                    self.method_runs[label], self.bench.workspace, request, self.sampling, memory
                )
        except BaseException as failure:  # the method will fail in the run too, which records it
            return describe_failure(failure)
        finally:
            memory.restore(fresh)
        return None

    def measure(
        self,
        label: str,
        orders: Sequence[MeasurementOrder],
        finished: Sequence[tuple[Any, ...]],
        size: int,
        chunk: int,
        arrivals: Sequence[float],
    ) -> list[MeasurementReply]:
        """Measure some outputs of one method, which are decoded together.

        Args:
            label: Label of the method.
            orders: The outputs to measure.
            finished: Keys of outputs from earlier orders. They will not be measured again, so they
                are deleted.
            size, chunk, arrivals: See `BatchMeasurement`.

        Raises:
            MethodFault: the method changed specbench code that measures the method.
        """
        for key in finished:
            self.measurements.pop(key, None)
        measurements = [self._get_measurement(label, each) for each in orders]
        make_measurable(measurements, size, chunk, arrivals).measure()
        changed = state.find_changes(self.code_snapshot)
        if changed:
            raise MethodFault(f"changes {', '.join(changed)} while it decodes")
        return [
            MeasurementReply(
                measurement.output,
                measurement.delay.ns,
                measurement.lost.message if measurement.lost else None,
            )
            for measurement in measurements
        ]

    def _get_measurement(self, label: str, order: MeasurementOrder) -> Measurement:
        key = (label, *order.key)
        if key not in self.measurements:
            self.measurements[key] = Measurement(
                self.method_runs[label],
                order.prompt,
                self.bench.create_prompt_request(order.prompt, order.budget),
                self.bench.workspace,
                self.sampling,
                order.pass_,
                self.memory.setdefault(label, Memory()),
                order.recording,
                order.reference,
                keeps_drafts=order.keeps_drafts,
                previous_delay=LearningDelay(order.previous_delay_ns),
            )
        return self.measurements[key]


_PROPERTIES = (
    "name params accept upper_bound requirements scope state_scope uses_costs learns timing_free"
    " workers bonus peer baseline batches paper_params tunable"
).split()


def serve() -> NoReturn:
    """Run a plug-in process: execute the orders of the run until the run ends.

    This is the entry point of the process (`worker_process.serve`). The first argument in
    `sys.argv` is the id of the parent process. If the parent ends, this process ends too.
    """
    exit_with_parent(int(sys.argv[1]))
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):  # the parent handles these and ends this process
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.dup2(2, 1)  # stdout belongs to the run
    _prefer_oom_kill()
    worker_process.serve(PluginOrders(), lambda work: replies.dump(_run_order(work)))


def _run_order(work: Callable[[], Any]) -> tuple[str, Any]:
    """Execute an order and return its outcome.

    Returns:
        ("done", result) if the order succeeds. ("refused", (class, message, hint)) if it raises an
        error class of specbench. ("failed", message) if it raises any other exception.
    """
    try:
        return "done", work()
    except SpecbenchError as fault:
        return "refused", (type(fault).__name__, fault.message, fault.hint)
    except KeyboardInterrupt:  # raised by the plug-in: SIGINT is ignored
        return "failed", "KeyboardInterrupt"
    except BaseException as fault:
        return "failed", describe_failure(fault)


def _prefer_oom_kill() -> None:
    """Make the operating system kill this process first if the machine runs out of memory.

    Otherwise the system could kill the main process of the run.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_memory() -> None:
    """Limit the memory of this process.

    Then its allocations fail before the whole machine runs out of memory.
    """
    import resource

    used = psutil.Process().memory_info().vms
    most = used + int(MAX_MEMORY_SHARE * psutil.virtual_memory().available)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
