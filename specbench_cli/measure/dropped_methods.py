"""Methods that are no longer measured in a repeat, because they failed or lost a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench_cli.errors import WorkerLost, to_one_line
from specbench_cli.measure.measurement import Measurement
from specbench_cli.measure.repeat_process import resume_command
from specbench_cli.measure.view import RunView
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.store.run_dir import RunDir

MAX_FAILURES = 3
"""Number of consecutive failed prompts after which a method is dropped."""


class DroppedMethods:
    """Failure counts of the methods in a repeat, and the methods that it no longer measures.

    Args:
        run_dir: Folder of the run. Its manifest lists the dropped methods.
        view: Display of progress, which shows a note for each dropped method.
        on_drop: Function that is called with the label of each method that is no longer measured.

    Attributes:
        left_out: Label of each method that stopped because one of its worker processes ended -> the
            error. A resumed run measures these methods again.
        dropped: Label of each method that failed repeatedly -> the error.
        failed_warm_up: Labels of the methods that failed during the warm-up.
    """

    def __init__(self, run_dir: RunDir, view: RunView, on_drop: Callable[[str], object]) -> None:
        self._run_dir, self._view, self._on_drop = run_dir, view, on_drop
        self.left_out: dict[str, WorkerLost] = {}
        self.dropped: dict[str, str] = {}
        self.failed_warm_up: set[str] = set()
        self._failures: dict[str, int] = {}

    def __contains__(self, label: str) -> bool:
        return label in self.left_out or label in self.dropped

    @property
    def labels(self) -> set[str]:
        """Labels of the methods that are no longer measured."""
        return {*self.left_out, *self.dropped}

    def leave_out(self, method_run: MethodRun, number: int, why: WorkerLost) -> None:
        """Stop measuring a method in this repeat, because one of its worker processes ended.

        This does not count as a failure of the method. The other methods continue.

        Args:
            method_run: The method.
            number: Number of the repeat.
            why: The error of the worker process.
        """
        if method_run.label not in self.left_out:
            self.left_out[method_run.label] = why
            self._on_drop(method_run.label)
            self._view.note(
                f"{method_run.label} is left out of the rest of pass {number}: {why.message};"
                f" {resume_command(self._run_dir.path)} measures the missing outputs"
            )

    def count_failures(self, method_run: MethodRun, measurements: Sequence[Measurement]) -> None:
        """Count a failure of a method, and drop the method if it has failed repeatedly.

        If the warm-up of the method failed too, the first failure already drops the method.

        Args:
            method_run: The method.
            measurements: The method's measurements of one batch of prompts. The method failed if
                all of these measurements have an error.
        """
        errors = [
            measurement.output.error
            for measurement in measurements
            if measurement.output is not None
        ]
        failed = bool(errors) and all(errors)
        self._failures[method_run.label] = (
            self._failures.get(method_run.label, 0) + 1 if failed else 0
        )
        failed_warm_up = method_run.label in self.failed_warm_up
        self.failed_warm_up.discard(method_run.label)
        if self._failures[method_run.label] >= (1 if failed_warm_up else MAX_FAILURES):
            self.dropped[method_run.label] = why = to_one_line(str(errors[0]))
            self._on_drop(method_run.label)
            dropped = self._run_dir.manifest.get("dropped") or {}
            self._run_dir.update(dropped={**dropped, method_run.label: why})
            when = "on its first prompt too" if failed_warm_up else f"{MAX_FAILURES} times in a row"
            self._view.note(f"{method_run.label} failed {when} and is dropped: {why}")
