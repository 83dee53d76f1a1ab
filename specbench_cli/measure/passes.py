"""One pass: every prompt once, all rows on it one after another; what is missing is made, judged,
kept."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NamedTuple

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.engine.session import Session
from specbench_cli.errors import PromptError, UsageError, WorkerLost, on_one_line
from specbench_cli.judge.verdict import Judge
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.cell import (
    WARM_UP_ROUNDS,
    WARM_UP_TOKENS,
    Cell,
    Delay,
    Measured,
    limited,
    measurable,
    one_line,
    warm_up,
)
from specbench_cli.measure.eta import LOADING, Pace, Work, process_seconds
from specbench_cli.measure.evidence import has_near_tie, near_ties, pictured, texts
from specbench_cli.measure.isolation.guests import Guests, Remote
from specbench_cli.measure.judging import REPLAY, Group, Judging
from specbench_cli.measure.machine_lock import Turns
from specbench_cli.measure.method_costs import Between
from specbench_cli.measure.quiet import QuietMeter
from specbench_cli.measure.repeats import resumption
from specbench_cli.measure.view import Progress, RunView
from specbench_cli.measure.window import Measurable, Windows
from specbench_cli.plan.plan import REFERENCE, Arm, Plan, wave
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import PASSES_APART, Key
from specbench_cli.tasks.schema import Question

Visits = Sequence[tuple[Question, tuple[Arm, ...]]]
"""Questions, each with its rows in their order there."""

TELL_EVERY_S = 2.0
"""Seconds after which the time left is told between two rows of a prompt."""

PROBE = "a round of the probe"
"""What it is called among the rows that take time."""

FAILURES = 3
"""So often in a row a method may fail before it is dropped."""


@dataclass
class Answers:
    """What a run holds already: which cells are done, vanilla's answers, the prompts as they
    were."""

    done: set[Key] = field(default_factory=set)
    vanilla: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    prompts: dict[tuple[str, int], Prompt] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: RunDir) -> Answers:
        """Read a run's folder."""
        found = cls(prompts={(p.prompt_id, p.turn): p for p in run_dir.prompts()})
        for key, ids in run_dir.answered().items():
            found.add(key, ids)
        return found

    def add(self, key: Key, output_ids: list[int] | None) -> None:
        """Take note of a record."""
        self.done.add(key)
        prompt_id, turn, label, pass_ = key
        if label == REFERENCE and output_ids is not None:
            self.vanilla[prompt_id, turn, pass_] = output_ids

    def lack(self, question: Question, arms: Sequence[Arm], number: int) -> bool:
        """Whether a cell of rows on a question is missing in a pass."""
        return any(key not in self.done for arm in arms for key in _keys(question, arm, number))

    def of(self, names: Collection[str]) -> Answers:
        """What is known of some questions."""
        return Answers(
            {key for key in self.done if key[0] in names},
            {key: ids for key, ids in self.vanilla.items() if key[0] in names},
            {key: prompt for key, prompt in self.prompts.items() if key[0] in names},
        )

    def learn(self, other: Answers) -> None:
        """Take note of what somebody else knows."""
        self.done |= other.done
        self.vanilla |= other.vanilla
        self.prompts |= other.prompts


def _keys(question: Question, arm: Arm, number: int) -> list[Key]:
    """The cells of a row on a question, a turn each."""
    turns = range(1, len(question.turns) + 1)
    return [(question.prompt_id, turn, arm.label, number) for turn in turns]


class Known(NamedTuple):
    """What is known of an output beforehand: its tokens in a replay, and for upper bounds."""

    recording: list[int] | None
    reference: list[int] | None


class Pass:
    """Runs what a pass still lacks.

    Args:
        plan, bench: what to run, on what.
        run_dir: where records go.
        answers: what is there already.
        view: who is told.
        turns: those that the run takes, if it does.
        guests: the rows that are decoded in processes of their plug-ins, if there are any.
        part: what a view calls the process's pass (`view.Progress`); several say their load too.
        between: what is probed between the prompts, if something is.

    Attributes:
        left_out: rows that were given up because a worker of theirs was lost, with why.
    """

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        run_dir: RunDir,
        answers: Answers,
        view: RunView,
        turns: Turns | None = None,
        guests: Guests | None = None,
        part: str = "",
        between: Between | None = None,
    ) -> None:
        self._plan = plan
        self._between = between
        self._bench = bench
        self._run_dir = run_dir
        self._answers = answers
        self._view = view
        config = plan.config
        self._sampling = replace(plan.sampling, processor=bench.processor)
        self.judge = Judge(
            oracle=lambda: bench.module("target"),
            sampling=self._sampling,
            texts=lambda: texts(plan, bench),
            decoder=bench.workspace.decoders["target"],
        )
        self._turns = turns
        self._windows = Windows(
            QuietMeter(self._working_for_it),
            allow_noise=config.allow_noise,
            between=None if turns is None else self._pass_on,
            told=view.window,
        )
        self._pending: deque[Group] = deque()
        self._pictured = pictured(plan.questions)
        self._judging = Judging(self.judge, plan, self._sampling, bench.tokenizer, self._pictured)
        self._opening: dict[str, list[Cell]] = {}
        self._delays: dict[str, Delay] = {}  # of each row's next cell
        self.left_out: dict[str, WorkerLost] = {}
        self._failed: dict[str, int] = {}
        self._cold: set[str] = set()  # methods that failed while warming up
        self._dropped: dict[str, str] = {}
        self._guests = guests or Guests(plan, run_dir, 1)
        self._alone = self._warm = self._judged = False
        self._of, self._part = part, part
        self._prompts = self._measured = 0
        self._told, self._last = monotonic(), True
        self._pace = Pace({arm.label: Work(0) for arm in plan.arms})

    def run(self, number: int) -> None:
        """Do the missing work of pass `number` (from 1), one of the process's `Plan.passes`."""
        if self.is_over():
            return
        memory = {arm.label: Memory() for arm in self._plan.arms}
        self._delays.clear()
        self._opening.clear()
        every = list(self._plan.visits(number))
        visits = [visit for visit in every if self._answers.lack(*visit, number)]
        if not visits:
            return
        if any(
            self._whole(arm) and self._answers.lack(q, (arm,), number)
            for q, arms in visits
            for arm in arms
        ):
            visits = every
        if len(self._plan.loads) > 1:
            self._part = f"{self._of}, load {self._plan.load(number)}".removeprefix(", ")
        self._view.stage(f"warming up {len(self._plan.arms)} rows")
        self._warm_up(visits[0][0], number, memory)
        # What is loaded by now is no garbage: the collection before each output need not go through
        # all of torch, which takes longer than many an output.
        gc.freeze()
        try:
            size = len(visits) if self._plan.loads else wave(self._plan.config.batch)
            back = visits[0][0] if len(visits) > size else None
            process = number % PASSES_APART
            starts = self._plan.config.repeats - process
            own = self._plan.passes(process)
            later = starts * len(own) + len(own) - 1 - own.index(number)
            self._last = later <= 0
            loads = self._compares and "transformers.modeling_utils" not in sys.modules
            self._pace = Pace(
                self._work(visits, number, later, back),
                later=starts,
                start=process_seconds(),
                judging=LOADING * process_seconds() if loads else 0.0,
            )
            self._prompts, self._measured = len(every), len(every) - len(visits)
            begun, limit = monotonic(), self._plan.config.stop_after
            for first in range(0, len(visits), size):
                if limit is not None and first and monotonic() - begun > limit:
                    self._view.note(
                        f"--stop-after {limit:g}: {self._measured} of {self._prompts} prompts"
                    )
                    break
                together = visits[first : first + size]
                questions = [question for question, _ in together]
                self._converse(questions, together[0][1], number, memory)
                self._measured += len(together)
                self._probe((first + len(together)) / len(visits))
                self._tell()
                if self.is_over():
                    self._view.note(
                        "only vanilla is left: the run ends after"
                        f" {self._measured} of {self._prompts} prompts"
                    )
                    break
            self._windows.settle()
            self._write()
            if len(visits) > size and not self.is_over():
                self._view.stage("decoding the first prompt once more")
                self.look_back()
        finally:
            gc.unfreeze()

    def is_over(self) -> bool:
        """Return True if vanilla is the only method left to measure."""
        return self._plan.is_over({*self.left_out, *self._dropped})

    def deal(self, number: int, names: Collection[str]) -> None:
        """Measure the questions of pass `number` that this process is dealt, together: all rows,
        none of which learns from prompt to prompt. Their records are written when this returns."""
        visits = [visit for visit in self._plan.visits(number) if visit[0].prompt_id in names]
        memory = {arm.label: Memory() for arm in self._plan.arms}
        if not self._warm:
            self._warm_up(visits[0][0], number, memory)
            gc.freeze()
            self._warm = True
        self._converse([question for question, _ in visits], visits[0][1], number, memory)
        self._windows.settle()
        self._write()

    def _work(
        self, visits: Visits, number: int, later: int, back: Question | None
    ) -> dict[str, Work]:
        """What this pass and the later ones have to do on each row: turns, weighted by the tokens
        that may be made. `back` is the question that `look_back` decodes."""
        budget = self._plan.budget
        whole = sum(budget(each) * len(each.turns) for each in self._plan.questions)
        rows = {}
        for arm in self._plan.arms:
            due = 0
            for question, _ in visits:
                keys = _keys(question, arm, number)
                missing = sum(key not in self._answers.done for key in keys)
                due += budget(question) * (len(keys) if self._learns(arm) else missing)
            if back is not None and self._looks_back(arm):
                due += budget(back) * len(back.turns)
            rows[arm.label] = Work(due, later * whole)
        if self._between is not None:
            starts = self._plan.config.repeats - number % PASSES_APART
            rows[PROBE] = Work(self._between.due(1.0), starts * self._between.rounds)
        return rows

    def _probe(self, share: float) -> None:
        """Measure the rounds of the probe that are due when such a share of the prompts is done."""
        if self._between is None:
            return
        for _ in range(self._between.due(share)):
            self._windows.settle()
            with self._pace.spent(PROBE, 1):
                self._between.round()

    def _tell(self) -> None:
        over = self._measured == self._prompts and self._last
        left = None if over else self._pace.left()
        self._told = monotonic()
        self._view.prompt(Progress(self._part, self._measured, self._prompts, left))

    def look_back(self) -> None:
        """Decode the pass's first prompt once more, without a clock, by every method that says it
        keeps nothing from prompt to prompt: it must come to the same."""
        leaks: dict[str, str] = {}
        for label, cells in self._opening.items():
            before = [cell.measured for cell in cells]
            if (
                label in self.left_out
                or label in self._dropped
                or any(m is None or m.error is not None for m in before)
            ):
                continue
            self._measurable(cells[0].arm, cells).measure()
            for cell, was in zip(cells, before, strict=True):
                assert was is not None
                if cell.lost is None and not cell.same(was):
                    leaks[label] = cell.prompt.prompt_id
        if leaks:
            self._run_dir.update(leaks={**(self._run_dir.manifest.get("leaks") or {}), **leaks})

    def _converse(
        self,
        questions: Sequence[Question],
        arms: Sequence[Arm],
        number: int,
        memory: Mapping[str, Memory],
    ) -> None:
        """All turns of questions that are decoded together."""
        answers: dict[str, list[list[int]]] = {question.prompt_id: [] for question in questions}
        turn = 1
        # Where vanilla failed, there is no context to go on from.
        while not self.is_over() and (
            live := [
                question
                for question in questions
                if len(answers[question.prompt_id]) == turn - 1 < len(question.turns)
            ]
        ):
            asked = [self._prompt(each, turn, answers[each.prompt_id]) for each in live]
            able: list[tuple[Question, Prompt]] = []
            for question, (prompt, fault) in zip(live, asked, strict=True):
                if fault is None:
                    able.append((question, prompt))
                else:
                    self._refuse(question, prompt, fault, arms, number)
            found = self._visit(able, arms, number, memory) if able else []
            for (question, _), answer in zip(able, found, strict=True):
                if answer is not None:
                    answers[question.prompt_id].append(answer)
            turn += 1

    def near_ties(self, needed: bool | None = None) -> dict[str, Any] | None:
        """See `evidence.near_ties`.

        Args:
            needed: True if an output of the run is a near-tie. None reads it from the records.

        Returns:
            None if there is no near-tie to explain, or outputs are not compared token by token.
        """
        if needed is None:
            needed = self._compares and has_near_tie(self._run_dir.records())
        if not needed:
            return None
        self._view.stage("looking for near-ties")
        return near_ties(
            self.judge, self._answers.prompts, self._answers.vanilla, self._bench.request
        )

    @property
    def _compares(self) -> bool:
        """Whether outputs are compared token by token."""
        return not self._sampling.draws and self._plan.config.verify != REPLAY

    def _looks_back(self, arm: Arm) -> bool:
        """Whether a prompt decoded twice in one process must come to the same counters: what
        forwards cost is the same all through a run."""
        method = arm.method
        same = method.timing_free or method.uses_costs
        return same and not method.peer and not self._learns(arm)

    def _working_for_it(self) -> set[int]:
        """Processes of other programs that decode for rows of the run."""
        return {pid for arm in self._plan.arms for pid in arm.method.processes()}

    @staticmethod
    def _learns(arm: Arm) -> bool:
        """Whether what a method decodes depends on the prompts before."""
        return arm.method.state_scope != "prompt"

    def _whole(self, arm: Arm) -> bool:
        """Whether a row that lacks some cells is decoded from its beginning: what was decoded
        before an interruption is learnt once more, or meets those that are missing under load."""
        return self._learns(arm) or bool(self._plan.loads)

    def _prompt(
        self, question: Question, turn: int, answers: Sequence[Sequence[int]]
    ) -> tuple[Prompt, PromptError | None]:
        """Return the prompt of a turn, and the error if the target cannot decode it.

        Later turns continue from vanilla's answers in the first pass. A prompt has no ids if the
        chat template or the tokenizer failed.
        """
        known = self._answers.prompts.get((question.prompt_id, turn))
        ids: list[int] = [] if known is None else known.ids
        fault = None
        try:
            ids = ids or self._bench.prompt(question, answers)
            name = f"{question.prompt_id}, turn {turn},"
            self._bench.check_fits(name, len(ids), self._plan.budget(question))
        except PromptError as found:
            fault = found
        if known is not None:
            return known, fault
        prompt = Prompt(
            prompt_id=question.prompt_id,
            cluster=question.cluster,
            task=question.task,
            family=question.family,
            category=question.category,
            turn=turn,
            text=question.turns[turn - 1],
            ids=ids,
        )
        self._run_dir.append_prompts([prompt])
        self._answers.prompts[question.prompt_id, turn] = prompt
        return prompt, fault

    def _refuse(
        self,
        question: Question,
        prompt: Prompt,
        fault: PromptError,
        arms: Sequence[Arm],
        number: int,
    ) -> None:
        """Store a failed record for each method that has none yet, for a prompt with an error."""
        group = Group(question, [], None)
        for arm in arms:
            key = prompt.prompt_id, prompt.turn, arm.label, number
            gone = arm.label in self.left_out or arm.label in self._dropped
            if gone or key in self._answers.done:
                continue
            stop = self._bench.stop(self._plan.budget(question))
            replays = self._plan.config.verify == REPLAY and not arm.method.peer
            cell = Cell(
                arm,
                prompt,
                Request(prompt.prompt_id, prompt.turn, tuple(prompt.ids), stop),
                self._bench.workspace,
                self._sampling,
                number,
                Memory(),
                [] if replays else None,
                load=self._plan.load(number),
            )
            cell.measured = Measured.failed(f"{PromptError.__name__}: {fault.message}")
            cell.settle(None, False)
            group.cells.append(cell)
        if group.cells:
            self._view.note(f"{fault.message}; the run continues without this turn")
            self._pending.append(group)
            self._write()

    def _visit(
        self,
        asked: Sequence[tuple[Question, Prompt]],
        arms: Sequence[Arm],
        number: int,
        memory: Mapping[str, Memory],
    ) -> list[list[int] | None]:
        """Run the missing cells of prompts that are decoded together; returns vanilla's answers."""
        requests = [self._request(question, prompt) for question, prompt in asked]
        bounds = any(arm.method.upper_bound for arm in arms)
        known = [
            Known(
                self._recording(request, number), self._vanilla(request, number) if bounds else None
            )
            for request in requests
        ]
        groups = [Group(question, [], None) for question, _ in asked]
        for arm in arms:
            if arm.label in self.left_out or arm.label in self._dropped:
                continue
            cells: list[Cell] = []
            kept: list[Group | None] = []
            own: list[Question] = []
            keys = [(prompt.prompt_id, prompt.turn, arm.label, number) for _, prompt in asked]
            there = [key in self._answers.done for key in keys]
            whole = self._learns(arm) or (self._whole(arm) and not all(there))
            for (question, prompt), request, told, group, done in zip(
                asked, requests, known, groups, there, strict=True
            ):
                if not done or whole:
                    cells.append(self._cell(arm, question, prompt, request, told, number, memory))
                    kept.append(None if done else group)
                    own.append(question)
            if not cells:
                continue
            cell = self._measurable(arm, cells)
            with self._pace.spent(arm.label, sum(map(self._plan.budget, own))):
                if any(kept):
                    self._windows.run(cell)
                else:
                    cell.measure()
            if not self._windows.open and monotonic() - self._told > TELL_EVERY_S:
                self._tell()
            self._count_failures(arm, cells)
            if self._looks_back(arm):
                self._opening.setdefault(arm.label, cells)
            lost = next((each.lost for each in cells if each.lost is not None), None)
            if lost is not None:
                self._leave_out(arm, number, lost)
                continue
            for made, keeper in zip(cells, kept, strict=True):
                if keeper is not None:
                    keeper.cells.append(made)
        for (_, prompt), group in zip(asked, groups, strict=True):
            group.reference = self._reference(prompt, number, group.cells)
        self._pending.extend(groups)
        self._write()
        return [group.reference for group in groups]

    def _request(self, question: Question, prompt: Prompt) -> Request:
        """A prompt as it is decoded; there is room for it."""
        budget = self._plan.budget(question)
        self._bench.workspace.reserve(len(prompt.ids) + budget)
        stop = self._bench.stop(budget)
        return self._bench.request(prompt.prompt_id, prompt.turn, prompt.ids, stop, prompt.category)

    def _cell(
        self,
        arm: Arm,
        question: Question,
        prompt: Prompt,
        request: Request,
        known: Known,
        number: int,
        memory: Mapping[str, Memory],
    ) -> Cell:
        cell = Cell(
            arm,
            prompt,
            request,
            self._bench.workspace,
            self._sampling,
            number,
            memory[arm.label],
            None if arm.method.peer else known.recording,
            known.reference if arm.method.upper_bound else None,
            pictured=number == 1 and question.prompt_id in self._pictured,
            delayed_by=self._delays.get(arm.label),
            limit_s=self._plan.config.timeout_per_prompt,
            load=self._plan.load(number),
            energy=self._bench.energy,
        )
        self._delays[arm.label] = cell.delay
        return cell

    def _recording(self, request: Request, number: int) -> list[int] | None:
        """In a replay, the tokens that all are given: vanilla's."""
        return self._vanilla(request, number) if self._plan.config.verify == REPLAY else None

    def _vanilla(self, request: Request, number: int) -> list[int]:
        """Return vanilla's output; decode it without timing if it does not exist yet.

        Raises:
            UsageError: the target's logits are not finite, so there is no output to replay.
        """
        known = self._answers.vanilla.get((request.prompt_id, request.turn, number))
        if known is not None:
            return known
        (vanilla,) = (arm.method for arm in self._plan.arms if arm.label == REFERENCE)
        session = Session(self._bench.workspace, request, self._sampling, pass_=number)
        try:
            for _ in vanilla.generate(session):
                pass
        except ArithmeticError as fault:
            target = self._plan.target.label
            raise UsageError(
                f"{target} has no output that other methods could replay: {fault}",
                "its weights contain nan or inf, or overflow in this dtype: use --dtype float32"
                " or another --target",
            ) from fault
        return list(session.output())

    def _reference(self, prompt: Prompt, number: int, cells: Sequence[Cell]) -> list[int] | None:
        for cell in cells:
            if cell.arm.label == REFERENCE and cell.measured and cell.measured.error is None:
                return cell.measured.output
        return self._answers.vanilla.get((prompt.prompt_id, prompt.turn, number))

    def _write(self) -> None:
        """Judge and keep the groups whose windows are settled, in order."""
        while self._pending and self._pending[0].settled:
            group = self._pending.popleft()
            for cell in group.cells:
                if cell.lost is not None:  # when it was measured once more
                    self._leave_out(cell.arm, cell.pass_, cell.lost)
            kept = [cell for cell in group.cells if cell.lost is None]
            with self._pace.judging():
                records = [self._judging.record(cell, group) for cell in kept]
                if not self._judged:
                    # What judging loads, which is transformers, is no garbage either (see `run`): a
                    # collection would go through it in 80 ms.
                    gc.freeze()
                    self._judged = True
            self._run_dir.append(records)
            for record in records:
                self._answers.add(record.key, record.output_ids)
                self._view.cell(record)

    def _leave_out(self, arm: Arm, number: int, why: WorkerLost) -> None:
        """Give a row up for the rest of the pass: it is no fault of the method's, and the others
        go on."""
        if arm.label not in self.left_out:
            self.left_out[arm.label] = why
            self._pace.drop(arm.label)
            self._view.note(
                f"{arm.label} is left out of the rest of pass {number}: {why.message};"
                f" {resumption(self._run_dir.path)} makes what is missing"
            )

    def _measurable(self, arm: Arm, cells: Sequence[Cell]) -> Measurable:
        """Cells of a row as they are measured: alone, together, or in their plug-in's process."""
        config, load = self._plan.config, self._plan.load(cells[0].pass_)
        size, chunk = config.batch, config.prefill_chunk
        arrivals = self._plan.loads[load][: len(cells)] if load else ()
        if arm.label in self._guests.labels:
            return Remote(self._guests, cells, size, chunk, arrivals)
        return measurable(cells, size, chunk, arrivals)

    def _count_failures(self, arm: Arm, cells: Sequence[Cell]) -> None:
        """Drop a method that fails repeatedly, or on its first prompt after a failed warm-up."""
        errors = [cell.measured.error for cell in cells if cell.measured is not None]
        failed = bool(errors) and all(errors)
        self._failed[arm.label] = self._failed.get(arm.label, 0) + 1 if failed else 0
        cold = arm.label in self._cold
        self._cold.discard(arm.label)
        if self._failed[arm.label] >= (1 if cold else FAILURES):
            self._dropped[arm.label] = why = on_one_line(str(errors[0]))
            self._pace.drop(arm.label)
            dropped = self._run_dir.manifest.get("dropped") or {}
            self._run_dir.update(dropped={**dropped, arm.label: why})
            when = "on its first prompt too" if cold else f"{FAILURES} times in a row"
            self._view.note(f"{arm.label} failed {when} and is dropped: {why}")

    def _pass_on(self) -> None:
        """Let another run measure a window; say so once where there is none."""
        assert self._turns is not None
        self._write()  # while nobody measures
        if not self._turns.pass_on() and not self._alone:
            self._alone = True
            self._run_dir.update(alone=True)  # later passes do not wait for a partner again
            self._view.note("no other run takes turns with this one: it goes on alone")

    def _warm_up(self, question: Question, number: int, memory: Mapping[str, Memory]) -> None:
        """Run every row a little: lazy set-up, caches and clocks are then as they will be. What was
        learnt is forgotten; the copies that rows train are made."""
        fresh = Memory().save()
        ids = tuple(self._bench.prompt(question))
        self._bench.workspace.reserve(len(ids) + max(WARM_UP_TOKENS, self._plan.budget(question)))
        request = self._bench.request("warm-up", 1, ids, self._bench.stop(WARM_UP_TOKENS))
        size = self._plan.config.batch or 1
        # A prompt's length that no forward had takes longer: the row that comes first would pay.
        lengths = {
            len(prompt): prompt
            for each in (self._plan.questions if size > 1 else ())
            for prompt in (tuple(self._bench.prompt(each)),)
        }
        together = [
            self._bench.request(f"warm-up {n}", 1, prompt, self._bench.stop(WARM_UP_TOKENS))
            for n, prompt in lengths.items()
        ]
        self._bench.workspace.reserve(max([len(ids), *lengths]) + WARM_UP_TOKENS)
        limit = self._plan.config.timeout_per_prompt
        failures: dict[str, str | None] = {}
        for arm in self._plan.arms:
            if arm.label in self._guests.labels:
                failures[arm.label] = self._guests.warm_up(arm, ids, self._bench.workspace.capacity)
        for arm in self._plan.arms * WARM_UP_ROUNDS:
            if arm.label in self.left_out or arm.label in self._guests.labels:
                continue
            try:
                with limited(limit and limit * (1 + len(together))):
                    own, how = memory[arm.label], (together, size)
                    warm_up(arm, self._bench.workspace, request, self._sampling, own, *how)
                failures[arm.label] = None
            except WorkerLost as lost:
                self._leave_out(arm, number, lost)
            except BaseException as fault:
                failures[arm.label] = one_line(fault)
        for label, failure in failures.items():
            if failure is not None:
                self._view.note(f"{label} failed while warming up: {failure}")
        self._cold = {label for label, failure in failures.items() if failure is not None}
        self._bench.peak("warming up")
        for kept in memory.values():
            kept.restore(fresh)
