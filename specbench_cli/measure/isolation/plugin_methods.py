"""Methods of plug-ins, as the main process of a run sees them. Plug-in processes measure them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specbench_cli.errors import (
    EnvironmentFault,
    MethodFault,
    SpecbenchError,
    UsageError,
    WorkerLost,
)
from specbench_cli.measure.batch_measurement import BatchMeasurement
from specbench_cli.measure.isolation.orders import LoadOrder, MeasurementOrder
from specbench_cli.measure.isolation.plugin_process import (
    PluginProcess,
    find_plugin_file,
    get_plugin_process,
)
from specbench_cli.measure.isolation.replies import MeasurementReply
from specbench_cli.measure.measurement import DecodedOutput, Measurement
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.manifest import truncate_texts
from specbench_cli.store.run_dir import RunDir


class PluginMethods:
    """The methods of a plan that are measured in plug-in processes.

    Args:
        plan: The plan of the run.
        run_dir: Folder of the run. The main process checks that plug-in processes do not change
            files in this folder.
        threads: Number of torch threads in the main process, and in each plug-in process.

    Attributes:
        labels: Labels of the methods that are measured in plug-in processes.
        heads: Manifest entries of the trained modules of these methods.
        load_errors: Label of each method whose plug-in process could not load the models or trained
            modules -> the error.
    """

    def __init__(self, plan: Plan, run_dir: RunDir, threads: int) -> None:
        self.labels = plan.isolated
        self._plan, self._run_dir, self._threads = plan, run_dir, threads
        files = {
            method_run.name: find_plugin_file(method_run.name, plan.config.plugins)
            for method_run in plan.method_runs
            if method_run.label in self.labels
        }
        self._processes = {
            method_run.label: get_plugin_process(files[method_run.name])
            for method_run in plan.method_runs
            if method_run.name in files
        }
        self._loaded: set[PluginProcess] = set()
        self._warm: dict[str, tuple[list[int], int]] = {}
        self._cold: set[str] = set()
        self._finished: list[tuple[Any, ...]] = []
        self.heads: dict[str, Any] = {}
        self.load_errors: dict[str, SpecbenchError] = {}
        for process in dict.fromkeys(self._processes.values()):
            try:
                self.heads |= self._load_models(process)
            except (UsageError, EnvironmentFault) as fault:
                own = (label for label, each in self._processes.items() if each is process)
                self.load_errors |= dict.fromkeys(own, fault)

    def warm_up(self, method_run: MethodRun, ids: Sequence[int], capacity: int) -> str | None:
        """Warm up a method in its plug-in process. Return the error if the method failed.

        Args:
            method_run: The method.
            ids: Token ids of the prompt.
            capacity: Number of tokens for which the model states are allocated.
        """
        self._warm[method_run.label] = [*ids], capacity
        try:
            return self._warm_up(method_run.label)
        except MethodFault as fault:
            return fault.message

    def measure(
        self,
        method_run: MethodRun,
        measurements: Sequence[Measurement],
        size: int,
        chunk: int,
        arrivals: Sequence[float],
    ) -> list[MeasurementReply]:
        """Measure outputs of a method in its plug-in process.

        If the process has ended and the method keeps nothing between prompts, a new process is
        started, and the method is warmed up again.

        Args:
            method_run: The method.
            measurements: The outputs to measure.
            size, chunk, arrivals: See `BatchMeasurement`.

        Raises:
            MethodFault: the process did not return a result, or it had ended before and the method
                learns between prompts, so that what it had learned is lost.
        """
        process, limit = self._processes[method_run.label], self._plan.config.timeout_per_prompt
        if not process.alive and method_run.method.state_scope != "prompt":
            raise MethodFault("its process has ended, so what the method learned is lost")
        if not process.alive:
            self._loaded.discard(process)
            self._cold |= {label for label, each in self._processes.items() if each is process}
        self._load_models(process)
        if method_run.label in self._cold and method_run.label in self._warm:
            self._warm_up(method_run.label)
        orders = [_make_order(measurement) for measurement in measurements]
        finished, self._finished = self._finished, []
        began = time.perf_counter_ns()
        with self._run_dir.forbid_changes(method_run.label):
            how = size, chunk, [*arrivals]
            found: list[MeasurementReply] = process.call(
                "measure",
                method_run.label,
                orders,
                finished,
                *how,
                timeout_s=limit * len(measurements),
            )
        took = time.perf_counter_ns() - began
        if len(found) != len(measurements) or any(
            each.output is not None and (each.output.ns.total or 0) > took for each in found
        ):
            raise MethodFault("its process reported more time than has passed")
        return found

    def mark_finished(self, method_run: MethodRun, measurements: Sequence[Measurement]) -> None:
        """Store the keys of measurements that will not be repeated.

        The next order to the plug-in process contains these keys. The process then deletes the
        outputs.
        """
        self._finished += [
            (method_run.label, *_make_order(measurement).key) for measurement in measurements
        ]

    def _load_models(self, process: PluginProcess) -> dict[str, Any]:
        if process in self._loaded:
            return {}
        plan = self._plan
        rows = tuple(
            (method_run.name, method_run.label, dict(method_run.user_params))
            for method_run in plan.method_runs
            if self._processes.get(method_run.label) is process
        )
        names = [name for name, _, _ in rows]
        config = plan.config.model_copy(
            update={
                "threads": self._threads,
                "plugins": [],
                "methods": [row for row in plan.config.methods if row.name in names],
            }
        )
        costs = self._run_dir.manifest.get("step_costs")
        models = plan.target, plan.draft, dict(plan.others)
        opening = LoadOrder(config, *models, costs, rows, plan.grammar)
        with self._run_dir.forbid_changes(", ".join(names)):
            heads: dict[str, Any] = truncate_texts(process.call("load_models", opening))
        self._loaded.add(process)
        return heads

    def _warm_up(self, label: str) -> str | None:
        ids, capacity = self._warm[label]
        limit = self._plan.config.timeout_per_prompt
        process = self._processes[label]
        with self._run_dir.forbid_changes(label):
            failure: str | None = process.call("warm_up", label, ids, capacity, timeout_s=limit)
        self._cold.discard(label)
        return failure


class PluginMeasurements(BatchMeasurement):
    """Measurements of one method, which are made in the method's plug-in process.

    Args:
        methods: All methods that are measured in plug-in processes.
        measurements, size, chunk, arrivals: See `BatchMeasurement`.
    """

    def __init__(
        self,
        methods: PluginMethods,
        measurements: Sequence[Measurement],
        size: int,
        chunk: int,
        arrivals: Sequence[float],
    ) -> None:
        super().__init__(measurements, size, chunk, arrivals)
        self._methods = methods

    def measure(self) -> None:
        """Measure the outputs. If the plug-in process ends, store an error in each measurement."""
        measurements = self._measurements
        try:
            how = self._size, self._chunk, self._arrivals
            found = self._methods.measure(measurements[0].method_run, measurements, *how)
        except MethodFault as fault:
            for measurement in measurements:
                measurement.output = DecodedOutput.failed(
                    f"{measurement.method_run.label}: {fault.message}"
                )
            return
        for measurement, each in zip(measurements, found, strict=True):
            measurement.output, measurement.delay.ns = each.output, each.delay_ns
            if each.lost is not None:
                measurement.lost = WorkerLost(each.lost)

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Accept the last results of all measurements.

        The plug-in process may then delete its copies.
        """
        super().finish(other_cpu, noisy)
        self._methods.mark_finished(self._measurements[0].method_run, self._measurements)


def _make_order(measurement: Measurement) -> MeasurementOrder:
    recording, reference = measurement.recording, measurement.reference
    return MeasurementOrder(
        measurement.prompt,
        measurement.request.stop.max_new_tokens,
        measurement.pass_,
        None if recording is None else [*recording],
        None if reference is None else [*reference],
        measurement.keeps_drafts,
        measurement.previous_delay_ns,
    )
