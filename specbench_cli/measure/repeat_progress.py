"""Progress of a repeat and the estimated time left, for the display (`view.RunView`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import monotonic

from specbench_cli.measure.eta import JUDGE_LOADING, EtaEstimator, Work, process_age
from specbench_cli.measure.method_costs import InterleavedProbe
from specbench_cli.measure.stored_outputs import StoredOutputs, output_keys
from specbench_cli.measure.view import PromptProgress, RunView
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.schema import LOAD_PASS_OFFSET
from specbench_cli.tasks.schema import Question

Schedule = Sequence[tuple[Question, tuple[MethodRun, ...]]]
"""Questions in their order, each with its methods in their order."""

REPORT_EVERY_S = 2.0
"""Minimum interval in seconds between two reports while the methods decode one prompt."""

PROBE = "a round of the probe"
"""Key of the probe's rounds, which are timed like a method."""


class RepeatProgress:
    """Progress counter of a repeat, with an estimate of the time left.

    Args:
        plan: The plan of the run.
        view: Display of the progress.
        interleaved_probe: Probe that measures costs between the prompts, or None.
        part: Name that the display shows for this part of the run (`view.PromptProgress`).

    Attributes:
        measured: Number of prompts that are already measured.
        prompts: Number of all prompts.
    """

    def __init__(
        self, plan: Plan, view: RunView, interleaved_probe: InterleavedProbe | None, part: str
    ) -> None:
        self._plan, self._view, self._probe = plan, view, interleaved_probe
        self._run_part = self._part = part
        self._eta = EtaEstimator({method_run.label: Work(0) for method_run in plan.method_runs})
        self.prompts = self.measured = 0
        self._reported, self._is_last = monotonic(), True

    def begin(
        self,
        number: int,
        schedule: Schedule,
        stored_outputs: StoredOutputs,
        repeated_question: Question | None,
        *,
        loads_judge: bool,
    ) -> None:
        """Start counting prompts and estimating the time left of a repeat.

        Args:
            number: Number from `Plan.passes`, which identifies the repeat and its load.
            schedule: Questions that the repeat measures, with their methods.
            stored_outputs: Outputs that are already stored.
            repeated_question: Question that is decoded again at the end of the repeat, or None.
            loads_judge: True if the first verdict will load the transformers model.
        """
        plan, process = self._plan, number % LOAD_PASS_OFFSET
        starts, own = plan.config.repeats - process, plan.passes(process)
        later = starts * len(own) + len(own) - 1 - own.index(number)
        if len(plan.loads) > 1:
            self._part = f"{self._run_part}, load {plan.load(number)}".removeprefix(", ")
        self._is_last = later <= 0
        work = {
            method_run.label: Work(
                self._remaining_tokens(
                    method_run, schedule, number, stored_outputs, repeated_question
                ),
                later * self._max_tokens,
            )
            for method_run in plan.method_runs
        }
        if self._probe is not None:
            work[PROBE] = Work(self._probe.rounds_due(1.0), starts * self._probe.rounds)
        start = process_age()
        self._eta = EtaEstimator(
            work,
            later_processes=starts,
            start_s=start,
            first_judging_s=JUDGE_LOADING * start if loads_judge else 0.0,
        )
        self.prompts = len(plan.questions)
        self.measured = self.prompts - len(schedule)

    def time_method(
        self, method_run: MethodRun, questions: Sequence[Question]
    ) -> AbstractContextManager[None]:
        """Time the `with` block, in which a method decodes questions.

        The estimate uses this time.
        """
        return self._eta.time_work(method_run.label, sum(map(self._plan.max_new_tokens, questions)))

    def time_probe(self) -> AbstractContextManager[None]:
        """Time the `with` block, in which a probe round is measured.

        The estimate uses this time.
        """
        return self._eta.time_work(PROBE, 1)

    def time_judging(self) -> AbstractContextManager[None]:
        """Time the `with` block, in which outputs are judged. The estimate uses this time."""
        return self._eta.time_judging()

    def drop(self, label: str) -> None:
        """Remove a method that is no longer measured from the estimate of the time left."""
        self._eta.drop(label)

    def report(self) -> None:
        """Display the number of measured prompts and the time left."""
        over = self.measured == self.prompts and self._is_last
        left = None if over else self._eta.seconds_left()
        self._reported = monotonic()
        self._view.prompt(PromptProgress(self._part, self.measured, self.prompts, left))

    def report_if_due(self) -> None:
        """Display the progress if it was last displayed more than `REPORT_EVERY_S` ago."""
        if monotonic() - self._reported > REPORT_EVERY_S:
            self.report()

    @property
    def _max_tokens(self) -> int:
        """Maximum number of new tokens that a method generates in a repeat."""
        budget = self._plan.max_new_tokens
        return sum(budget(each) * len(each.turns) for each in self._plan.questions)

    def _remaining_tokens(
        self,
        method_run: MethodRun,
        schedule: Schedule,
        number: int,
        stored_outputs: StoredOutputs,
        repeated_question: Question | None,
    ) -> int:
        """Return the maximum number of tokens that a method still has to generate in a repeat."""
        budget, due = self._plan.max_new_tokens, 0
        for question, _ in schedule:
            keys = output_keys(question, method_run, number)
            missing = sum(key not in stored_outputs.done for key in keys)
            due += budget(question) * (len(keys) if method_run.learns_from_prompts else missing)
        if repeated_question is not None and method_run.is_reproducible:
            due += budget(repeated_question) * len(repeated_question.turns)
        return due
