"""Measurement of a repeat: all methods decode each prompt, and the outputs are judged and stored.

A run measures its prompts in one or several repeats. Each repeat runs in a new process.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.errors import PromptError, WorkerLost
from specbench_cli.judge.verdict import OutputJudge
from specbench_cli.measure import warm_up
from specbench_cli.measure.batch_measurement import make_measurable
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.dropped_methods import DroppedMethods
from specbench_cli.measure.isolation.plugin_methods import PluginMeasurements, PluginMethods
from specbench_cli.measure.machine_lock import MachineLock
from specbench_cli.measure.measurement import DecodedOutput, LearningDelay, Measurement
from specbench_cli.measure.method_code import describe_failure
from specbench_cli.measure.method_costs import InterleavedProbe
from specbench_cli.measure.prompts import KnownOutput, PromptBuilder
from specbench_cli.measure.quiet import Measurable, MeasurementWindows, NoiseMeter
from specbench_cli.measure.record_builder import (
    REPLAY,
    PromptMeasurements,
    RecordBuilder,
    encode_tolerance_texts,
    find_near_ties,
    has_near_tie,
    select_draft_samples,
)
from specbench_cli.measure.repeat_progress import RepeatProgress, Schedule
from specbench_cli.measure.stored_outputs import StoredOutputs
from specbench_cli.measure.view import RunView
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan, prompts_per_batch
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import BASELINE, RecordKey
from specbench_cli.tasks.schema import Question


class _MeasuredPrompt(NamedTuple):
    """A prompt that all methods decode, with the measurements of these methods.

    known: Vanilla's output, if a method or a replay needs it before decoding.
    """

    question: Question
    prompt: Prompt
    request: Request
    known: KnownOutput
    measurements: list[Measurement]

    def key(self, method_run: MethodRun, number: int) -> RecordKey:
        """Return the key of a method's record on this prompt.

        `number` is the number of the repeat.
        """
        return self.prompt.prompt_id, self.prompt.turn, method_run.label, number


class Repeat:
    """Measurement of the missing outputs of a repeat.

    Args:
        plan, bench: The plan of the run, and its loaded models.
        run_dir: Folder of the run, in which records are stored.
        stored_outputs: Outputs that are already stored.
        view: Display of progress and notes.
        machine_lock: Lock for runs that measure in turn. None without --in-turn.
        plugins: Methods that are decoded in plug-in processes.
        part: Name that the display shows for this part of the run (`view.PromptProgress`).
        interleaved_probe: Probe that measures costs between the prompts, or None.

    Attributes:
        judge: Judge of the outputs.
    """

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        run_dir: RunDir,
        stored_outputs: StoredOutputs,
        view: RunView,
        machine_lock: MachineLock | None = None,
        plugins: PluginMethods | None = None,
        part: str = "",
        interleaved_probe: InterleavedProbe | None = None,
    ) -> None:
        self._plan = plan
        self._interleaved_probe = interleaved_probe
        self._progress = RepeatProgress(plan, view, interleaved_probe, part)
        self._dropped = DroppedMethods(run_dir, view, self._progress.drop)
        self._bench = bench
        self._run_dir = run_dir
        self._stored_outputs = stored_outputs
        self._view = view
        config = plan.config
        self._sampling = replace(plan.sampling, processor=bench.processor)
        self.judge = OutputJudge(
            oracle=lambda: bench.module("target"),
            sampling=self._sampling,
            texts=lambda: encode_tolerance_texts(plan, bench),
            decoder=bench.workspace.decoders["target"],
        )
        self._machine_lock = machine_lock
        self._windows = MeasurementWindows(
            NoiseMeter(self._helper_processes),
            allow_noise=config.allow_noise,
            before_window=None if machine_lock is None else self._pass_lock_on,
            on_window=view.window,
        )
        self._pending: deque[PromptMeasurements] = deque()
        self._draft_samples = select_draft_samples(plan.questions)
        self._prompts = PromptBuilder(plan, bench, run_dir, stored_outputs, self._sampling)
        self._record_builder = RecordBuilder(
            self.judge, plan, self._sampling, bench.tokenizer, self._draft_samples
        )
        self._first_outputs: dict[str, list[Measurement]] = {}
        # Label of a method -> time by which learning delays the method's next output.
        self._delays: dict[str, LearningDelay] = {}
        self._plugins = plugins or PluginMethods(plan, run_dir, 1)
        self._has_no_partner = self._is_warm = self._has_judged = False

    @property
    def left_out(self) -> Mapping[str, WorkerLost]:
        """Methods that stopped because one of their worker processes ended -> the error."""
        return self._dropped.left_out

    def run(self, number: int) -> None:
        """Measure the missing outputs of a repeat.

        Args:
            number: Number from `Plan.passes`. A repeat that measures several loads (arrival rates
                of requests) has one number for each load.
        """
        schedule = [] if self.is_over() else self._list_missing(number)
        if not schedule:
            return
        memory = {method_run.label: Memory() for method_run in self._plan.method_runs}
        self._delays.clear()
        self._first_outputs.clear()
        self._view.stage(f"warming up {len(self._plan.method_runs)} methods")
        self._warm_up(schedule[0][0], number, memory)
        # The garbage collector runs before each measurement. It would scan all Python objects,
        # which can take longer than the measurement. So exclude all objects that exist now.
        gc.freeze()
        try:
            self._measure(schedule, number, memory)
        finally:
            gc.unfreeze()

    def _list_missing(self, number: int) -> Schedule:
        """Return the questions with missing outputs, with the methods that must decode them.

        If a method with missing outputs must decode from its first prompt, return all questions.
        """
        all_questions = list(self._plan.schedule(number))
        schedule = [
            each for each in all_questions if self._stored_outputs.lacks_output(*each, number)
        ]
        must_restart = any(
            self._must_restart(method_run)
            and self._stored_outputs.lacks_output(question, (method_run,), number)
            for question, method_runs in schedule
            for method_run in method_runs
        )
        return all_questions if must_restart else schedule

    def _measure(self, schedule: Schedule, number: int, memory: Mapping[str, Memory]) -> None:
        """Measure the questions in order. Then decode the first question again (`check_leaks`).

        Args:
            schedule: Questions with their methods.
            number: Number of the repeat.
            memory: Data that each method has learned from earlier prompts, by label.
        """
        size = len(schedule) if self._plan.loads else prompts_per_batch(self._plan.config.batch)
        repeated_question = schedule[0][0] if len(schedule) > size else None
        loads_judge = self._compares_tokens and "transformers.modeling_utils" not in sys.modules
        progress = self._progress
        progress.begin(
            number, schedule, self._stored_outputs, repeated_question, loads_judge=loads_judge
        )
        begun, limit = monotonic(), self._plan.config.stop_after
        for first in range(0, len(schedule), size):
            done = f"{progress.measured} of {progress.prompts} prompts"
            if limit is not None and first and monotonic() - begun > limit:
                self._view.note(f"--stop-after {limit:g}: {done}")
                break
            batch = schedule[first : first + size]
            questions = [question for question, _ in batch]
            self._measure_conversations(questions, batch[0][1], number, memory)
            progress.measured += len(batch)
            self._measure_due_rounds((first + len(batch)) / len(schedule))
            progress.report()
            if self.is_over():
                done = f"{progress.measured} of {progress.prompts} prompts"
                self._view.note(f"only vanilla is left: the run ends after {done}")
                break
        self._windows.close()
        self._store_finished()
        if repeated_question is not None and not self.is_over():
            self._view.stage("decoding the first prompt once more")
            self.check_leaks()

    def is_over(self) -> bool:
        """Return True if vanilla is the only method that is still measured."""
        return self._plan.is_over(self._dropped.labels)

    def run_questions(self, number: int, names: Collection[str]) -> None:
        """Measure some questions of a repeat as one batch, and store their records.

        Cluster workers call this function. It does not support methods that learn from earlier
        prompts.

        Args:
            number: Number of the repeat.
            names: Prompt ids of the questions.
        """
        schedule = [each for each in self._plan.schedule(number) if each[0].prompt_id in names]
        memory = {method_run.label: Memory() for method_run in self._plan.method_runs}
        if not self._is_warm:
            self._warm_up(schedule[0][0], number, memory)
            gc.freeze()
            self._is_warm = True
        self._measure_conversations(
            [question for question, _ in schedule], schedule[0][1], number, memory
        )
        self._windows.close()
        self._store_finished()

    def _measure_due_rounds(self, share: float) -> None:
        """Measure the rounds of the probe that are due now.

        Args:
            share: Share of the prompts that are already measured, from 0 to 1.
        """
        if self._interleaved_probe is None:
            return
        for _ in range(self._interleaved_probe.rounds_due(share)):
            self._windows.close()
            with self._progress.time_probe():
                self._interleaved_probe.measure_round()

    def check_leaks(self) -> None:
        """Decode the first prompt again, and store the methods whose result differs.

        Such a method keeps state from other prompts. Only methods that must be reproducible are
        checked (`MethodRun.is_reproducible`).
        """
        leaks: dict[str, str] = {}
        for label, measurements in self._first_outputs.items():
            before = [each.output for each in measurements]
            if label in self._dropped or any(m is None or m.error is not None for m in before):
                continue
            self._make_measurable(measurements[0].method_run, measurements).measure()
            for measurement, first_output in zip(measurements, before, strict=True):
                assert first_output is not None
                if measurement.lost is None and not measurement.matches(first_output):
                    leaks[label] = measurement.prompt.prompt_id
        if leaks:
            self._run_dir.update(leaks={**(self._run_dir.manifest.get("leaks") or {}), **leaks})

    def _measure_conversations(
        self,
        questions: Sequence[Question],
        method_runs: Sequence[MethodRun],
        number: int,
        memory: Mapping[str, Memory],
    ) -> None:
        """Measure all turns of questions that are decoded as a batch.

        Args:
            questions: The questions.
            method_runs: The methods.
            number: Number of the repeat.
            memory: Data that each method has learned from earlier prompts, by label.
        """
        answers: dict[str, list[list[int]]] = {question.prompt_id: [] for question in questions}
        turn = 1
        # The prompt of a turn contains vanilla's answers to earlier turns. So if vanilla failed in
        # a turn, later turns of the question are skipped.
        while not self.is_over() and (
            live := [
                question
                for question in questions
                if len(answers[question.prompt_id]) == turn - 1 < len(question.turns)
            ]
        ):
            prompts = [self._prompts.build(each, turn, answers[each.prompt_id]) for each in live]
            decodable: list[tuple[Question, Prompt]] = []
            for question, (prompt, fault) in zip(live, prompts, strict=True):
                if fault is None:
                    decodable.append((question, prompt))
                else:
                    self._record_prompt_error(question, prompt, fault, method_runs, number)
            found = self._measure_batch(decodable, method_runs, number, memory) if decodable else []
            for (question, _), answer in zip(decodable, found, strict=True):
                if answer is not None:
                    answers[question.prompt_id].append(answer)
            turn += 1

    def find_near_ties(self, needed: bool | None = None) -> dict[str, Any] | None:
        """Return where near-ties are possible, see `record_builder.find_near_ties`.

        Args:
            needed: True if an output of the run is a near-tie. If None, the records are searched
                for a near-tie.

        Returns:
            None if no output is a near-tie, or if outputs are not compared token by token.
        """
        if needed is None:
            needed = self._compares_tokens and has_near_tie(self._run_dir.records())
        if not needed:
            return None
        self._view.stage("looking for near-ties")
        return find_near_ties(
            self.judge,
            self._stored_outputs.prompts,
            self._stored_outputs.vanilla,
            self._bench.create_request,
        )

    @property
    def _compares_tokens(self) -> bool:
        """True if the run compares outputs with vanilla's, token by token."""
        return not self._sampling.draws and self._plan.config.verify != REPLAY

    def _helper_processes(self) -> set[int]:
        """Return the ids of processes that decode for methods but are not this process's
        children.
        """
        return {
            pid for method_run in self._plan.method_runs for pid in method_run.method.processes()
        }

    def _must_restart(self, method_run: MethodRun) -> bool:
        """Return True if a resumed method must decode again from its first prompt.

        This is necessary if the method learns from prompts, because the learned data was lost. It
        is also necessary if requests arrive with a load, because they are decoded together.
        """
        return method_run.learns_from_prompts or bool(self._plan.loads)

    def _record_prompt_error(
        self,
        question: Question,
        prompt: Prompt,
        fault: PromptError,
        method_runs: Sequence[MethodRun],
        number: int,
    ) -> None:
        """Store a failed record of each method for a prompt that cannot be decoded.

        Args:
            question, prompt: The question, and the prompt of one of its turns.
            fault: The error.
            method_runs: The methods. Methods that already have a record are skipped.
            number: Number of the repeat.
        """
        group = PromptMeasurements(question, [], None)
        for method_run in method_runs:
            key = prompt.prompt_id, prompt.turn, method_run.label, number
            if method_run.label in self._dropped or key in self._stored_outputs.done:
                continue
            stop = self._bench.stop_rule(self._plan.max_new_tokens(question))
            replays = self._plan.config.verify == REPLAY and not method_run.method.peer
            measurement = Measurement(
                method_run,
                prompt,
                Request(prompt.prompt_id, prompt.turn, tuple(prompt.ids), stop),
                self._bench.workspace,
                self._sampling,
                number,
                Memory(),
                [] if replays else None,
                load=self._plan.load(number),
            )
            measurement.output = DecodedOutput.failed(f"{PromptError.__name__}: {fault.message}")
            measurement.finish(None, False)
            group.measurements.append(measurement)
        if group.measurements:
            self._view.note(f"{fault.message}; the run continues without this turn")
            self._pending.append(group)
            self._store_finished()

    def _measure_batch(
        self,
        prompts: Sequence[tuple[Question, Prompt]],
        method_runs: Sequence[MethodRun],
        number: int,
        memory: Mapping[str, Memory],
    ) -> list[list[int] | None]:
        """Measure the missing outputs of one batch of prompts with all methods.

        Args:
            prompts: The prompts with their questions.
            method_runs: The methods.
            number: Number of the repeat.
            memory: Data that each method has learned from earlier prompts, by label.

        Returns:
            Vanilla's output for each prompt. None if vanilla failed on this prompt.
        """
        requests = [
            self._bench.create_prompt_request(prompt, self._plan.max_new_tokens(question))
            for question, prompt in prompts
        ]
        measured_prompts = [
            _MeasuredPrompt(
                question, prompt, request, self._prompts.find_known_output(request, number), []
            )
            for (question, prompt), request in zip(prompts, requests, strict=True)
        ]
        for method_run in method_runs:
            if method_run.label not in self._dropped:
                self._measure_method(method_run, measured_prompts, number, memory[method_run.label])
        groups = [
            PromptMeasurements(
                each.question,
                each.measurements,
                self._find_reference(each.prompt, number, each.measurements),
            )
            for each in measured_prompts
        ]
        self._pending.extend(groups)
        self._store_finished()
        return [group.reference for group in groups]

    def _measure_method(
        self, method_run: MethodRun, prompts: Sequence[_MeasuredPrompt], number: int, memory: Memory
    ) -> None:
        """Measure the missing outputs of one method on a batch of prompts.

        A method that must restart decodes all prompts, but only missing outputs are stored.

        Args:
            method_run: The method.
            prompts: The prompts. The measurements are stored in these objects.
            number: Number of the repeat.
            memory: Data that the method has learned from earlier prompts.
        """
        done = [each.key(method_run, number) in self._stored_outputs.done for each in prompts]
        decode_all = method_run.learns_from_prompts or (
            self._must_restart(method_run) and not all(done)
        )
        due = [
            (prompt, not is_done)
            for prompt, is_done in zip(prompts, done, strict=True)
            if decode_all or not is_done
        ]
        if not due:
            return
        measurements = [
            self._create_measurement(method_run, prompt, number, memory) for prompt, _ in due
        ]
        measurable = self._make_measurable(method_run, measurements)
        with self._progress.time_method(method_run, [prompt.question for prompt, _ in due]):
            if any(is_new for _, is_new in due):
                self._windows.run(measurable)
            else:
                measurable.measure()
        if not self._windows.open:
            self._progress.report_if_due()
        self._dropped.count_failures(method_run, measurements)
        if method_run.is_reproducible:
            self._first_outputs.setdefault(method_run.label, measurements)
        lost = next((each.lost for each in measurements if each.lost is not None), None)
        if lost is not None:
            self._dropped.leave_out(method_run, number, lost)
            return
        for measurement, (prompt, is_new) in zip(measurements, due, strict=True):
            if is_new:
                prompt.measurements.append(measurement)

    def _create_measurement(
        self, method_run: MethodRun, prompt: _MeasuredPrompt, number: int, memory: Memory
    ) -> Measurement:
        measurement = Measurement(
            method_run,
            prompt.prompt,
            prompt.request,
            self._bench.workspace,
            self._sampling,
            number,
            memory,
            None if method_run.method.peer else prompt.known.recording,
            prompt.known.reference if method_run.method.upper_bound else None,
            keeps_drafts=number == 1 and prompt.question.prompt_id in self._draft_samples,
            previous_delay=self._delays.get(method_run.label),
            limit_s=self._plan.config.timeout_per_prompt,
            load=self._plan.load(number),
            energy=self._bench.energy,
        )
        self._delays[method_run.label] = measurement.delay
        return measurement

    def _find_reference(
        self, prompt: Prompt, number: int, measurements: Sequence[Measurement]
    ) -> list[int] | None:
        """Return vanilla's output for a prompt, measured now or stored.

        Return None if vanilla failed.
        """
        for each in measurements:
            if each.method_run.label == BASELINE and each.output and each.output.error is None:
                return each.output.output_ids
        return self._stored_outputs.vanilla.get((prompt.prompt_id, prompt.turn, number))

    def _store_finished(self) -> None:
        """Judge and store the outputs of prompts whose measurements are all accepted.

        Keep the order of the prompts.
        """
        while self._pending and self._pending[0].finished:
            group = self._pending.popleft()
            for each in group.measurements:
                if each.lost is not None:  # a worker ended when a noisy window was repeated
                    self._dropped.leave_out(each.method_run, each.pass_, each.lost)
            complete = [each for each in group.measurements if each.lost is None]
            with self._progress.time_judging():
                records = [self._record_builder.build(each, group) for each in complete]
                if not self._has_judged:
                    # Judging has imported transformers, which creates many objects. Exclude them
                    # from garbage collection as in `run`, because scanning them takes 80 ms.
                    gc.freeze()
                    self._has_judged = True
            self._run_dir.append(records)
            for record in records:
                self._stored_outputs.add(record.key, record.output_ids)
                self._view.show_record(record)

    def _make_measurable(
        self, method_run: MethodRun, measurements: Sequence[Measurement]
    ) -> Measurable:
        """Return the object that measures some outputs of a method.

        The object decodes a single prompt or a batch, in this process or in a plug-in process.
        """
        config, load = self._plan.config, self._plan.load(measurements[0].pass_)
        size, chunk = config.batch, config.prefill_chunk
        arrivals = self._plan.loads[load][: len(measurements)] if load else ()
        if method_run.label in self._plugins.labels:
            return PluginMeasurements(self._plugins, measurements, size, chunk, arrivals)
        return make_measurable(measurements, size, chunk, arrivals)

    def _pass_lock_on(self) -> None:
        """Let another run measure for one window. If there is no other run, show a note once."""
        assert self._machine_lock is not None
        self._store_finished()  # write files now, not while another run measures
        if not self._machine_lock.pass_on() and not self._has_no_partner:
            self._has_no_partner = True
            self._run_dir.update(alone=True)  # later repeats do not wait for a partner
            self._view.note("no other run measures in turn with this one: it continues alone")

    def _warm_up(self, question: Question, number: int, memory: Mapping[str, Memory]) -> None:
        """Decode a few tokens with each method. Then discard what the method learned from them.

        A method that trains a copy of a model creates the copy here, so that the copying is not
        timed.

        Args:
            question: The question to decode.
            number: Number of the repeat.
            memory: Data that each method has learned from earlier prompts, by label.
        """
        fresh, dropped = Memory().save(), self._dropped
        warm = warm_up.WarmUp(self._plan, self._bench, question)
        failures: dict[str, str | None] = {}
        capacity = self._bench.workspace.capacity
        for method_run in self._plan.method_runs:
            if method_run.label in self._plugins.labels:
                failures[method_run.label] = self._plugins.warm_up(method_run, warm.ids, capacity)
        for method_run in self._plan.method_runs * warm_up.WARM_UP_ROUNDS:
            if method_run.label in dropped.left_out or method_run.label in self._plugins.labels:
                continue
            try:
                warm.run(method_run, self._sampling, memory[method_run.label])
                failures[method_run.label] = None
            except WorkerLost as lost:
                dropped.leave_out(method_run, number, lost)
            except BaseException as fault:
                failures[method_run.label] = describe_failure(fault)
        for label, failure in failures.items():
            if failure is not None:
                self._view.note(f"{label} failed while warming up: {failure}")
        dropped.failed_warm_up = {
            label for label, failure in failures.items() if failure is not None
        }
        self._bench.store_peak("warming up")
        for each in memory.values():
            each.restore(fresh)
