"""Verdicts, scores and log-probabilities of measured outputs, and the causes of near-ties."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum
from typing import Any

from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import PromptError
from specbench_cli.judge.verdict import Judge, NotFinite, Reading, is_judged
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.cell import Cell
from specbench_cli.plan.plan import Plan
from specbench_cli.scoring import score
from specbench_cli.stats.neartie import chance_of_any
from specbench_cli.store.invariants import validate
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record, Verdict
from specbench_cli.tasks import decode_text
from specbench_cli.tasks.schema import Question

REPLAY = "replay"
Outputs = Mapping[tuple[str, int, int], Sequence[int]]
"""Outputs by prompt, turn and repeat."""

DECIMALS = 3  # of the log-probabilities that are kept: they are looked at


@dataclass
class Group:
    """The cells of one prompt, which are judged, scored and written together."""

    question: Question
    cells: list[Cell]
    reference: list[int] | None
    scores: dict[tuple[int, ...], float | None] = field(default_factory=dict)
    readings: dict[tuple[int, ...], Reading] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether every cell's window has been settled."""
        return all(cell.settled for cell in self.cells)


class Judging:
    """Makes records of measured cells.

    Args:
        judge: gives the verdicts.
        plan, sampling: of the run.
        tokenizer: of the target.
        sampled: the questions on which vanilla itself is judged, whatever the others say.
    """

    def __init__(
        self,
        judge: Judge,
        plan: Plan,
        sampling: Sampling,
        tokenizer: Any,
        sampled: Collection[str],
    ) -> None:
        self._judge = judge
        self._config, self._grammar = plan.config, plan.grammar
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._sampled = sampled

    def record(self, cell: Cell, group: Group) -> Record:
        """The record of a cell, which was measured; a failed one has neither verdict nor score.

        A cell fails too where the target's logits are not finite, and where what it tells
        contradicts itself.
        """
        if cell.result.error is None:
            try:
                return self._judged(cell, group)
            except NotFinite as fault:
                where = f"step {_step_of(cell.result.steps.committed, fault.at)}, {fault}"
                cell.result.error = f"{cell.method_run.label}, {cell.prompt.prompt_id}, {where}"
            except ArithmeticError as fault:
                cell.result.error = f"{cell.method_run.label}, {cell.prompt.prompt_id}: {fault}"
        return cell.record(None)

    def _judged(self, cell: Cell, group: Group) -> Record:
        reading = self._reading(cell, group)
        # Of outputs that no token verdict is possible of: evidence in place of proof.
        drawn = self._sampling.draws and self._config.verify != REPLAY
        record = cell.record(
            self._verdict(cell, group),
            self._score(cell, group),
            log_likelihood=fsum(reading.log_probs) if drawn else None,
            likelihood=reading.likelihood if drawn else None,
            log_probs=[round(each, DECIMALS) + 0.0 for each in reading.log_probs],
            valid=self._valid(cell),
        )
        try:
            validate(record)
        except ValueError as contradiction:
            cell.result.error = f"what it tells contradicts itself: {contradiction}"
            return cell.record(None)
        return record

    def _verdict(self, cell: Cell, group: Group) -> Verdict:
        if cell.method_run.label == BASELINE:
            return self._of_reference(cell, group)
        rule, output = self._sampling.rule, cell.result.output
        guarantee = cell.method_run.guarantees[rule]
        if cell.replays or guarantee not in LOSSLESS:
            return Verdict("unchecked")
        if self._sampling.draws:
            return self._judge.drawn(cell.request, output)
        if group.reference is None:  # vanilla failed, which makes the run bad
            return Verdict("unchecked")
        if cell.method_run.method.peer:
            return self._judge.verdict(cell.request, group.reference, output)
        steps, drafts = cell.result.steps, cell.result.drafts
        return self._judge.verdict(cell.request, group.reference, output, steps, drafts)

    def _of_reference(self, cell: Cell, group: Group) -> Verdict:
        """Vanilla's own verdict: on a sample of prompts, on all where that was asked for, and
        wherever somebody who promises its tokens came to others."""
        rule, output = self._sampling.rule, cell.result.output
        if self._sampling.draws:
            found = self._judge.drawn(cell.request, output)
            return Verdict("reference") if found.kind == "unchecked" else found
        asked = self._config.judge == "all" or cell.prompt.prompt_id in self._sampled
        asked &= self._config.acceptance is None  # the module says nothing that is imposed
        parted = any(
            is_judged(other.method_run.guarantees[rule], rule) and other.measured.output != output
            for other in group.cells
            if other.measured is not None and other.measured.error is None
        )
        if not asked and not parted:
            return Verdict("reference")
        return self._judge.reference(cell.request, output)

    def _score(self, cell: Cell, group: Group) -> float | None:
        """How right the answer is. Equal answers are scored once: running code takes its time."""
        if group.question.scorer is None:
            return None
        ids = tuple(cell.result.output)
        if ids not in group.scores:
            try:
                text = decode_text(self._tokenizer, ids)
            except PromptError:  # an answer that cannot be decoded to text has no score
                group.scores[ids] = None
                return None
            group.scores[ids] = score(
                group.question,
                cell.prompt.turn,
                text,
                run_code=self._config.run_code,
                uncontained=self._config.uncontained,
            )
        return group.scores[ids]

    def _valid(self, cell: Cell) -> bool | None:
        """Whether a complete output belongs to the run's grammar, by its text alone."""
        if self._grammar is None or cell.result.finish != "eos":
            return None
        return self._grammar.holds(decode_text(self._tokenizer, cell.result.output))

    def _reading(self, cell: Cell, group: Group) -> Reading:
        """The output as the target reads it: one forward for equal outputs."""
        ids = tuple(cell.result.output)
        if ids not in group.readings:
            group.readings[ids] = self._judge.read(cell.request, ids)
        return group.readings[ids]


def _step_of(committed: Sequence[int], token: int) -> int:
    """The step that an output token came with, prefill being step 0."""
    ends = accumulate(committed, initial=1)
    return sum(end <= token for end in ends)


def texts(plan: Plan, bench: Bench) -> Iterator[list[int]]:
    """What the tolerance is measured on: the run's questions, then the others of its tasks.

    The same whenever and by whichever pass it is asked for.
    """
    rest = (question for task in plan.tasks for question in task.questions)
    for question in (*plan.questions, *rest):
        with suppress(PromptError):  # the model may be unable to decode questions outside the run
            yield bench.prompt(question)


def pictured(questions: Sequence[Question]) -> frozenset[str]:
    """Questions on which every row keeps its drafts, in pass 1: the first of each family, in the
    plan's order. A constant, so that whoever reads records knows where to look; a sample, because
    drafts are larger than all the rest of a record."""
    first: dict[str, str] = {}
    for question in questions:
        first.setdefault(question.family, question.prompt_id)
    return frozenset(first.values())


def has_near_tie(records: Iterable[Record]) -> bool:
    """Return True if an output is a near-tie, so that vanilla's ties are needed to explain it."""
    return any(r.verdict is not None and r.verdict.kind == "near-tie" for r in records)


def near_ties(
    judge: Judge,
    prompts: Mapping[tuple[str, int], Prompt],
    vanilla: Outputs,
    request: Callable[[str, int, Sequence[int], StopRule], Request],
) -> dict[str, Any]:
    """Where vanilla's outputs have ties within the tolerance, and so near-ties may be expected.

    This costs one forward of transformers' module per output. The verdict of a near-tie, which
    needs the result, has measured the tolerance before.

    Args:
        judge: of the run.
        prompts: as they were.
        vanilla: its outputs; of several passes the first counts, as all are the same.
        request: makes one of a prompt; see `Bench.request`.
    Returns:
        For the manifest: how many `outputs` and `positions` were looked at, how many positions are
        `ties`, how many outputs are `expected` at most to differ by rounding, and by output
        (prompt, turn) the `chances` above 0.
    """
    first: dict[tuple[str, int], Sequence[int]] = {}
    for (prompt_id, turn, _), ids in sorted(vanilla.items()):
        first.setdefault((prompt_id, turn), ids)
    ties, chances = 0, []
    for key, ids in first.items():
        # Chances depend on neither stop strings nor budget.
        asked = request(*key, prompts[key].ids, StopRule(frozenset(), len(ids)))
        at = judge.chances(asked, ids)
        ties += sum(chance > 0 for chance in at)
        if any(at):
            chances.append([*key, chance_of_any(at)])
    return {
        "outputs": len(first),
        "positions": sum(map(len, first.values())),
        "ties": ties,
        "expected": sum(chance for *_, chance in chances),
        "chances": chances,
    }
