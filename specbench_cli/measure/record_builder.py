"""Records of measurements. This module judges and scores outputs and builds their records.

It also finds the positions in vanilla's outputs where near-ties are possible (`judge.neartie`). A
near-tie is a position where rounding errors may change the chosen token.
"""

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
"""Value of the option --verify: vanilla's tokens replace the target's decisions."""
Outputs = Mapping[tuple[str, int, int], Sequence[int]]
"""Token ids of outputs, by prompt id, turn and repeat."""

DECIMALS = 3
"""Decimals of stored log-probabilities, which are only used for display."""


@dataclass
class PromptMeasurements:
    """Measurements of all methods on one prompt, which are judged and stored together.

    reference: Vanilla's output. None if vanilla failed.
    scores: Score of each distinct output. It is stored, so that equal outputs are scored once.
    likelihoods: Likelihood of each distinct output. It is stored for the same reason.
    """

    question: Question
    measurements: list[Measurement]
    reference: list[int] | None
    scores: dict[tuple[int, ...], float | None] = field(default_factory=dict)
    likelihoods: dict[tuple[int, ...], OutputLikelihood] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if all measurements are accepted, so that none of them will be repeated."""
        return all(measurement.finished for measurement in self.measurements)


class RecordBuilder:
    """Builder of records. It judges and scores the outputs of measurements.

    Args:
        judge: Judge of the outputs.
        plan: Plan of the run.
        sampling: Sampling settings of the run.
        tokenizer: Tokenizer of the target.
        reference_samples: Prompt ids of the questions on which vanilla's own output is always
            judged.
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
        """Return the record of a measurement.

        The record of a failed measurement has neither a verdict nor a score. A measurement also
        fails in this method if the target's logits are not finite, or if its record is
        inconsistent.

        Args:
            measurement: The measurement.
            prompt_measurements: The measurements of all methods on the same prompt.
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
        # Sampled outputs cannot be compared with vanilla's output. So store the likelihood of each
        # output. `judge.broken` tests the likelihoods of many outputs together.
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
            measurement.result.error = f"its counters are inconsistent: {contradiction}"
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
        if prompt_measurements.reference is None:  # vanilla failed, so nothing can be compared
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
        """Judge vanilla's own output with the transformers model.

        This is done for a sample of the prompts, or for all prompts with `--judge all`. It is also
        done for prompts on which a lossless method generated other tokens than vanilla.
        """
        rule, output = self._sampling.rule, measurement.result.output_ids
        if self._sampling.draws:
            found = self._judge.judge_sampled(measurement.request, output)
            return Verdict("reference") if found.kind == "unchecked" else found
        selected = self._config.judge == "all" or measurement.prompt.prompt_id in self._sampled
        # If the run simulates an acceptance rate, the transformers model cannot reproduce the
        # outputs.
        selected &= self._config.acceptance is None
        differs = any(
            requires_same_tokens(other.method_run.guarantees[rule], rule)
            and other.output.output_ids != output
            for other in prompt_measurements.measurements
            if other.output is not None and other.output.error is None
        )
        if not selected and not differs:
            return Verdict("reference")
        return self._judge.judge_reference(measurement.request, output)

    def _score(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> float | None:
        """Return the score of an answer. Return None if the task has no scorer.

        Equal answers are scored only once, because executing generated code is slow.
        """
        if prompt_measurements.question.scorer is None:
            return None
        ids = tuple(measurement.result.output_ids)
        if ids not in prompt_measurements.scores:
            try:
                text = decode_text(self._tokenizer, ids)
            except PromptError:  # the tokenizer cannot convert the answer to text
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
        """Return True if the text of an output matches the grammar of the run.

        Return None if the run has no grammar, or if the output did not end with EOS.
        """
        if self._grammar is None or measurement.result.finish != "eos":
            return None
        return self._grammar.accepts(decode_text(self._tokenizer, measurement.result.output_ids))

    def _read_output(
        self, measurement: Measurement, prompt_measurements: PromptMeasurements
    ) -> OutputLikelihood:
        """Return the likelihood of an output. Equal outputs are read only once, by one forward."""
        ids = tuple(measurement.result.output_ids)
        if ids not in prompt_measurements.likelihoods:
            prompt_measurements.likelihoods[ids] = self._judge.compute_likelihood(
                measurement.request, ids
            )
        return prompt_measurements.likelihoods[ids]


def _step_of(committed: Sequence[int], token: int) -> int:
    """Return the number of the step that generated an output token. The prefill is step 0.

    Args:
        committed: Number of tokens that each step generated.
        token: Index of the token in the output.
    """
    ends = accumulate(committed, initial=1)
    return sum(end <= token for end in ends)


def encode_tolerance_texts(plan: Plan, bench: Bench) -> Iterator[list[int]]:
    """Yield the token ids of texts on which the tolerance of near-ties is measured.

    The texts are the questions of the run, then all other questions of its tasks. The order is the
    same in every repeat.
    """
    rest = (question for task in plan.tasks for question in task.questions)
    for question in (*plan.questions, *rest):
        with suppress(PromptError):  # other questions of the task may not fit the model
            yield bench.encode_prompt(question)


def select_draft_samples(questions: Sequence[Question]) -> frozenset[str]:
    """Return the prompt ids of the questions whose drafts are stored in the first repeat.

    Drafts need more space than the rest of a record, so only a sample is stored. The sample is the
    first question of each family (kind of task). Readers of records can rely on this choice.
    """
    first: dict[str, str] = {}
    for question in questions:
        first.setdefault(question.family, question.prompt_id)
    return frozenset(first.values())


def has_near_tie(records: Iterable[Record]) -> bool:
    """Return True if the verdict on an output is "near-tie"."""
    return any(r.verdict is not None and r.verdict.kind == "near-tie" for r in records)


def find_near_ties(
    judge: OutputJudge,
    prompts: Mapping[tuple[str, int], Prompt],
    vanilla: Outputs,
    request: Callable[[str, int, Sequence[int], StopRule], Request],
) -> dict[str, Any]:
    """Find the positions in vanilla's outputs where rounding may change the token.

    This needs one forward of the transformers model per output. It also needs the tolerance, which
    the judge measured when it found the first near-tie.

    Args:
        judge: Judge of the run.
        prompts: Prompts of the outputs.
        vanilla: Outputs of vanilla. Only outputs of the first repeat are used, because all repeats
            have the same outputs.
        request: Function that creates a request, see `Bench.create_request`.

    Returns:
        Manifest entry with these keys:

        - outputs, positions: Number of vanilla's outputs, and number of their tokens.
        - ties: Number of positions where rounding may change the token.
        - expected: Upper bound of the expected number of outputs that rounding changes.
        - chances: Prompt id, turn, and probability that rounding changes the output. Outputs with
          probability 0 are left out.
    """
    first: dict[tuple[str, int], Sequence[int]] = {}
    for (prompt_id, turn, _), ids in sorted(vanilla.items()):
        first.setdefault((prompt_id, turn), ids)
    ties, chances = 0, []
    for key, ids in first.items():
        # The stop rule of this request is a placeholder, because the probabilities of tokens do not
        # depend on it.
        own_request = request(*key, prompts[key].ids, StopRule(frozenset(), len(ids)))
        flip_chances = judge.flip_chances(own_request, ids)
        ties += sum(chance > 0 for chance in flip_chances)
        if any(flip_chances):
            chances.append([*key, chance_of_any(flip_chances)])
    return {
        "outputs": len(first),
        "positions": sum(map(len, first.values())),
        "ties": ties,
        "expected": sum(chance for *_, chance in chances),
        "chances": chances,
    }
