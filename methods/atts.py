"""ATTS: the draft model writes chunks of text, and a conformal test accepts or rejects each chunk.

Jing Xiong, Qiujiang Chen, Fanghua Ye, Zhongwei Wan et al.: ATTS: Asynchronous Test-Time Scaling via
Conformal Prediction, 2025, arXiv:2509.15148.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specbench_cli.api import (
    Batch,
    Draft,
    Field,
    Method,
    SegmentParams,
    SegmentRule,
    Segments,
    Session,
    Step,
    mean_log_prob,
)


def p_value(score: float, known: Sequence[float]) -> float:
    """Return the conformal p-value (1 + number of calibration scores at least as bad) / (n + 1).

    A score is the negative mean log-probability of a chunk under the target.

    Args:
        score: Score of the chunk to test.
        known: Scores of the n calibration chunks, in ascending order. The first is the best.
    """
    return (1 + len(known) - bisect_left(known, score)) / (1 + len(known))


@dataclass(frozen=True, kw_only=True)
class ConformalRule(SegmentRule):
    """Accept rule that accepts a chunk if its conformal p-value is above the rejection rate
    alpha.
    """

    alpha: float
    name: ClassVar[str] = "conformal"

    def accepts(self, grade: float) -> bool:
        return grade > self.alpha

    @property
    def is_exact(self) -> bool:
        return self.alpha >= 1


class AttsParams(SegmentParams):
    """Parameters of `Atts`."""

    alpha: float = Field(
        0.4, ge=0, le=1, description="share of the chunks to reject (authors' code: 0.4)"
    )
    known: int = Field(
        64, ge=0, description="number of prompts whose first chunks calibrate the test in a run"
    )
    length: int = Field(
        0,
        ge=0,
        description="number of tokens that the draft model drafts per step while the target writes",
    )
    barrier: bool = Field(
        False,
        description="with --batch: no sequence drafts a new chunk until all rejected chunks of"
        " the batch are replaced",
    )


class Atts(Method):
    """ATTS: the draft model writes chunks of text, and the target rewrites the least likely ones.

    Lossy: a chunk that is likely enough under the target is accepted unchanged. The parameter alpha
    sets the rejection rate. At alpha 1 no chunk is accepted, and the target writes the whole
    output. The first chunks of the run's first prompts are the calibration chunks. The rejection
    rate is alpha only for chunks that are statistically exchangeable with them. Later chunks and
    other tasks are not exchangeable.
    Differs from the authors' code: the target replaces a rejected chunk, but keeps the first tokens
    that it would have generated itself. A chunk is compared with the calibration chunks, not with
    other chunks of the same step.

    One step:
    1. The draft model writes a chunk. After a rejection, the target writes the rest of the chunk.
    2. One target forward scores the chunk. The rank of this score among the calibration scores
       gives a p-value, which decides whether the whole chunk is accepted.
    """

    name: ClassVar[str] = "atts"
    family: ClassVar[str] = "a draft model, a segment of text at a time"
    proposed_in: ClassVar[tuple[str, ...]] = ("xiong2025atts",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[AttsParams]] = AttsParams
    params: AttsParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    state_scope = "run"
    bonus: ClassVar[bool] = False
    batches: ClassVar[bool] = True
    exact_params: ClassVar[Mapping[str, Any]] = {"alpha": 1.0}

    @property
    def accept(self) -> SegmentRule:
        """Rule that accepts or rejects a whole chunk."""
        return self.params.choose_rule(ConformalRule(alpha=self.params.alpha))

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one chunk after another."""
        segments = Segments(session, self.params.delimiter, self.params.cap)
        session.prefill()
        while session.finish is None:
            # Step 1: The draft model writes a chunk. After a rejection, the target writes the rest
            # of the chunk.
            draft = segments.draft(self.params.length if segments.is_replacing else None)
            yield self.settle(session, segments, draft, session.score(draft))

    def settle(self, session: Session, segments: Segments, draft: Draft, rows: Tensor) -> Step:
        """Carry out step 2 in the docstring of the class: accept or reject the chunk by its
        p-value.
        """
        if segments.is_replacing or not draft.nodes:
            return segments.verify_and_commit(draft, rows)
        rule = self.accept
        if (grade := rule.random_grade(session.random, rows)) is None:
            known, score = session.memory.setdefault("scores", []), -mean_log_prob(rows, draft)
            grade = p_value(score, known)
            if not segments.num_judged and len(known) < self.params.known:
                insort(known, score)
        rule = rule.judge(grade)
        return segments.verify_and_commit(
            draft, rows, rule, spans=1, stood=rule.accepted, grade=grade
        )

    def generate_batch(self, batch: Batch) -> Iterator[Step]:
        """Decode the requests of a batch.

        The parameter `barrier` decides whether requests wait for each other.
        """
        segments_of, params = dict[Session, Segments](), self.params
        while not batch.finished:
            batch.join(
                lambda each: segments_of.update(
                    {each: Segments(each, params.delimiter, params.cap)}
                )
            )
            rejected = [each for each in batch.active if segments_of[each].is_replacing]
            ready = rejected if params.barrier and rejected else batch.active
            if not ready:
                batch.prefill()
                continue
            drafts = [
                (s, segments_of[s].draft(params.length if segments_of[s].is_replacing else None))
                for s in ready
            ]
            rows, forwards = batch.score(drafts), batch.forwards()
            for (each, draft), own in zip(drafts, rows, strict=True):
                step = self.settle(each, segments_of[each], draft, own)
                yield replace(step, seq=batch.sessions.index(each), forwards=forwards)
        batch.leave()
