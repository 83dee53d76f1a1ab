"""Records of measurements: verdicts, scores, log-probabilities, and the causes of near-ties."""

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
from specbench_cli.judge.verdict import (
    NonFiniteLogits,
    OutputJudge,
    OutputLikelihood,
    requires_same_tokens,
)
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.measurement import Measurement
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

DECIMALS = 3  # decimals of stored log-probabilities, which are only displayed


@dataclass
class PromptMeasurements:
    """Measurements of one prompt, which are judged, scored and stored together."""

    question: Question
    measurements: list[Measurement]
    reference: list[int] | None
    scores: dict[tuple[int, ...], float | None] = field(default_factory=dict)
    likelihoods: dict[tuple[int, ...], OutputLikelihood] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if the window of every measurement is closed."""
        return all(measurement.finished for measurement in self.measurements)


class RecordBuilder:
    """Builder of records from measurements.

    Args:
        judge: Judge of the outputs.
        plan, sampling: Plan and sampling settings of the run.
        tokenizer: Tokenizer of the target.
        sampled: Questions on which vanilla itself is always judged.
    """

    def __init__(
        self,
        judge: OutputJudge,
        plan: Plan,
        sampling: Sampling,
        tokenizer: Any,
        reference_samples: Collection[str],
    ) -> None:
        self._judge = judge
        self._config, self._grammar = plan.config, plan.grammar
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._sampled = reference_samples

    def build(self, measurement: Measurement, prompt_measurements: PromptMeasurements) -> Record:
        """Build the record of a measurement. A failed one has neither verdict nor score.

        A measurement also fails if the target's logits are not finite, or if its record is
        inconsistent.
        """
        if measurement.result.error is None:
            try:
                return self._build_judged(measurement, prompt_measurements)
            except NonFiniteLogits as fault:
                where = (
                    f"step {_step_of(measurement.result.steps.committed, fault.position)}, {fault}"
                )
                measurement.result.error = (
                    f"{measurement.method_run.label}, {measurement.prompt.prompt_id}, {where}"
                )
            except ArithmeticError as fault:
                measurement.result.error = (
                    f"{measurement.method_run.label}, {measurement.prompt.prompt_id}: {fault}"
                )
        return measurement.build_record(None)

    def _build_judged(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> Record:
        output_likelihood = self._read_output(measurement, prompt_measurements)
        # Without a token verdict, the likelihood is evidence in place of a proof.
        drawn = self._sampling.draws and self._config.verify != REPLAY
        record = measurement.build_record(
            self._verdict(measurement, prompt_measurements),
            self._score(measurement, prompt_measurements),
            log_likelihood=fsum(output_likelihood.log_probs) if drawn else None,
            likelihood=output_likelihood.likelihood if drawn else None,
            log_probs=[round(each, DECIMALS) + 0.0 for each in output_likelihood.log_probs],
            valid=self._valid(measurement),
        )
        try:
            validate(record)
        except ValueError as contradiction:
            measurement.result.error = f"what it tells contradicts itself: {contradiction}"
            return measurement.build_record(None)
        return record

    def _verdict(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> Verdict:
        if measurement.method_run.label == BASELINE:
            return self._judge_reference(measurement, prompt_measurements)
        rule, output = self._sampling.rule, measurement.result.output_ids
        guarantee = measurement.method_run.guarantees[rule]
        if measurement.is_replay or guarantee not in LOSSLESS:
            return Verdict("unchecked")
        if self._sampling.draws:
            return self._judge.judge_sampled(measurement.request, output)
        if prompt_measurements.reference is None:  # vanilla failed, which makes the run bad
            return Verdict("unchecked")
        if measurement.method_run.method.peer:
            return self._judge.compare(measurement.request, prompt_measurements.reference, output)
        steps, drafts = measurement.result.steps, measurement.result.drafts
        return self._judge.compare(
            measurement.request, prompt_measurements.reference, output, steps, drafts
        )

    def _judge_reference(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> Verdict:
        """Judge vanilla's output: on a sample of prompts, on all with `--judge all`, and wherever a
        method that guarantees its tokens has others."""
        rule, output = self._sampling.rule, measurement.result.output_ids
        if self._sampling.draws:
            found = self._judge.judge_sampled(measurement.request, output)
            return Verdict("reference") if found.kind == "unchecked" else found
        asked = self._config.judge == "all" or measurement.prompt.prompt_id in self._sampled
        asked &= self._config.acceptance is None  # the module does not know imposed acceptance
        differs = any(
            requires_same_tokens(other.method_run.guarantees[rule], rule)
            and other.output.output_ids != output
            for other in prompt_measurements.measurements
            if other.output is not None and other.output.error is None
        )
        if not asked and not differs:
            return Verdict("reference")
        return self._judge.judge_reference(measurement.request, output)

    def _score(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> float | None:
        """Score an answer. Equal answers are scored once, because running code is slow."""
        if prompt_measurements.question.scorer is None:
            return None
        ids = tuple(measurement.result.output_ids)
        if ids not in prompt_measurements.scores:
            try:
                text = decode_text(self._tokenizer, ids)
            except PromptError:  # an answer that cannot be decoded to text has no score
                prompt_measurements.scores[ids] = None
                return None
            prompt_measurements.scores[ids] = score(
                prompt_measurements.question,
                measurement.prompt.turn,
                text,
                run_code=self._config.run_code,
                uncontained=self._config.uncontained,
            )
        return prompt_measurements.scores[ids]

    def _valid(self, measurement: Measurement) -> bool | None:
        """Return True if a complete output belongs to the grammar, judged by its text only."""
        if self._grammar is None or measurement.result.finish != "eos":
            return None
        return self._grammar.accepts(decode_text(self._tokenizer, measurement.result.output_ids))

    def _read_output(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> OutputLikelihood:
        """Return the likelihood of an output, with one forward for equal outputs."""
        ids = tuple(measurement.result.output_ids)
        if ids not in prompt_measurements.likelihoods:
            prompt_measurements.likelihoods[ids] = self._judge.compute_likelihood(
                measurement.request, ids
            )
        return prompt_measurements.likelihoods[ids]


def _step_of(committed: Sequence[int], token: int) -> int:
    """Return the step of an output token. Prefill is step 0."""
    ends = accumulate(committed, initial=1)
    return sum(end <= token for end in ends)


def encode_tolerance_texts(plan: Plan, bench: Bench) -> Iterator[list[int]]:
    """Yield the texts for the tolerance: the run's questions, then the others of its tasks.

    The order is the same in every repeat.
    """
    rest = (question for task in plan.tasks for question in task.questions)
    for question in (*plan.questions, *rest):
        with suppress(PromptError):  # the model may be unable to decode questions outside the run
            yield bench.encode_prompt(question)


def select_draft_samples(questions: Sequence[Question]) -> frozenset[str]:
    """Return the questions whose drafts are stored in the first repeat: the first of each family.

    Readers of records can rely on this choice. It is a sample because drafts are larger than the
    rest of a record.
    """
    first: dict[str, str] = {}
    for question in questions:
        first.setdefault(question.family, question.prompt_id)
    return frozenset(first.values())


def has_near_tie(records: Iterable[Record]) -> bool:
    """Return True if an output is a near-tie, so that vanilla's ties are needed to explain it."""
    return any(r.verdict is not None and r.verdict.kind == "near-tie" for r in records)


def find_near_ties(
    judge: OutputJudge,
    prompts: Mapping[tuple[str, int], Prompt],
    vanilla: Outputs,
    request: Callable[[str, int, Sequence[int], StopRule], Request],
) -> dict[str, Any]:
    """Find positions of vanilla's outputs where near-ties are possible, within the tolerance.

    This costs one forward of transformers' module per output. The verdict of a near-tie has
    measured the tolerance before.

    Args:
        judge: Judge of the run.
        prompts: Prompts of the outputs.
        vanilla: Outputs of vanilla. The first repeat counts, as all are equal.
        request: Creates a request; see `Bench.request`.

    Returns:
        Manifest entry: numbers of `outputs` and `positions`, number of `ties`, the `expected`
            number of outputs that differ by rounding (upper bound), and the `chances` above 0 by
            (prompt, turn).
    """
    first: dict[tuple[str, int], Sequence[int]] = {}
    for (prompt_id, turn, _), ids in sorted(vanilla.items()):
        first.setdefault((prompt_id, turn), ids)
    ties, chances = 0, []
    for key, ids in first.items():
        # The probabilities depend neither on stop strings nor on the budget.
        asked = request(*key, prompts[key].ids, StopRule(frozenset(), len(ids)))
        at = judge.flip_chances(asked, ids)
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
