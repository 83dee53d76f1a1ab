"""SpecReason: a small model writes the reasoning steps, and the target grades them.

Rui Pan, Yinwei Dai, Zhihao Zhang, Gabriele Oliaro, Zhihao Jia, Ravi Netravali: SpecReason: Fast and
Accurate Inference-Time Compute via Speculative Reasoning, NeurIPS 2025, arXiv:2504.07891.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    SegmentParams,
    SegmentRule,
    Segments,
    Session,
    Step,
    host,
    mean_log_prob,
)

BEST, ASKS = 9, ("digit", "average")


@dataclass(frozen=True, kw_only=True)
class GradeRule(SegmentRule):
    """Accept rule that accepts a reasoning step if its grade, from 0 to 9, reaches a threshold."""

    threshold: float
    name: ClassVar[str] = "grade"

    def accepts(self, grade: float) -> bool:
        return grade >= self.threshold

    @property
    def is_exact(self) -> bool:
        return self.threshold > BEST


class SpecReasonParams(SegmentParams):
    """Parameters of `SpecReason`."""

    threshold: float = Field(
        7.0,
        ge=0,
        description="minimum grade of an accepted step, from 0 to 9 (authors' code: 7); 10"
        " makes the method lossless",
    )
    grade: Literal["likelihood", "digit", "average"] = Field(
        "likelihood",
        description="how the target grades a step: likelihood (9 times the geometric mean of"
        " its tokens' probabilities), digit (the most likely answer to `question`)"
        " or average (the mean of likely answers)",
    )
    question: str = Field(
        "\nHow right is that, from 0 to 9? ",
        description="grade=digit or average: question to the target after the step",
    )
    first: int = Field(
        0,
        ge=0,
        description="number of steps that the target writes before the draft model writes one",
    )
    length: int = Field(
        0,
        ge=0,
        description="number of tokens that the draft model drafts per step while the target writes",
    )


class SpecReason(Method):
    """SpecReason: the draft model writes a reasoning step, and the target grades it or rewrites it.

    Lossy: a reasoning step with a good grade is accepted unchanged. At threshold 10 no step is
    accepted, and the target writes the whole output. At threshold 0 every step is accepted, and the
    draft model writes the output.
    Differs from the paper: from a rejected step, the target keeps the first tokens that it would
    have generated itself. Outputs follow the run's stop rule. By default the grade is computed from
    the likelihood of the step, because small targets cannot answer the paper's grading question.

    One decoding step:
    1. The draft model writes a reasoning step, up to a delimiter.
    2. One target forward scores the reasoning step, and the target grades it from 0 to 9 (the
       utility score).
    3. If the grade reaches `threshold`, commit the reasoning step. Otherwise commit only its first
       tokens that the target also generates.
    4. The target writes the rest of the reasoning step.
    """

    name: ClassVar[str] = "specreason"
    family: ClassVar[str] = "a draft model, a segment of text at a time"
    proposed_in: ClassVar[tuple[str, ...]] = ("pan2025specreason",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[SpecReasonParams]] = SpecReasonParams
    params: SpecReasonParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    bonus: ClassVar[bool] = False
    exact_params: ClassVar[Mapping[str, Any]] = {"threshold": 10.0}
    paper_params: ClassVar[Mapping[str, Any]] = {"grade": "digit", "delimiter": "\n\n", "cap": 512}

    @property
    def accept(self) -> SegmentRule:
        """Rule that accepts or rejects a whole reasoning step."""
        return self.params.choose_rule(GradeRule(threshold=self.params.threshold))

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one reasoning step after another."""
        params, asks_target = self.params, self.params.grade in ASKS
        segments = Segments(session, params.delimiter, params.cap)
        self.question = segments.vocabulary.encode(params.question.encode()) if asks_target else []
        if self.question:
            session.reserve(len(self.question))
        session.prefill()
        while session.finish is None:
            # Step 1: The draft model writes a reasoning step, up to a delimiter.
            if segments.num_segments > params.first and (step := segments.draft()).nodes:
                # Step 2: One target forward reads the reasoning step, and the target grades it.
                rows = session.score(step)
                grade = self.grade(session, segments, step, rows)
                # Step 3: Commit the reasoning step if its grade is high enough. Otherwise commit
                # only the prefix that the target also generates.
                rule = self.accept.judge(grade)
                yield segments.verify_and_commit(
                    step, rows, rule, spans=1, stood=rule.accepted, grade=grade
                )
            # Step 4: The target writes the rest of the reasoning step.
            yield from segments.write_with_target(params.length)
            segments.begin()

    def grade(self, session: Session, segments: Segments, step: Draft, rows: Tensor) -> float:
        """Return the grade of a reasoning step, from 0 to 9.

        Return 0 if the target does not answer with a digit.
        """
        if (random_grade := self.accept.random_grade(session.random, rows)) is not None:
            return random_grade
        if self.params.grade not in ASKS:
            return BEST * math.exp(mean_log_prob(rows, step))
        row = segments.score_question(self.question) if self.question else rows[-1]
        digit = {segments.vocabulary.ids.get(b"%d" % each): each for each in range(BEST + 1)}
        top = row.softmax(-1).topk(min(10 if self.params.grade == "average" else 1, len(row)))
        chances, ids = host.lists(top.values, top.indices)
        answers = [
            (p, digit[token]) for p, token in zip(chances, ids, strict=True) if token in digit
        ]
        mass = sum(p for p, _ in answers)
        return sum(p * each for p, each in answers) / mass if mass else 0.0
