"""ATTS: a conformal test of each chunk that the draft model writes, at a chosen rejection rate.

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
    """Return the conformal p-value (1 + number of known scores at least as bad) / (n + 1).

    Args:
        score: Score of a chunk: its negative mean log-probability under the target.
        known: Scores of the n calibration chunks, in ascending order, so the best comes first.
    """
    return (1 + len(known) - bisect_left(known, score)) / (1 + len(known))


@dataclass(frozen=True, kw_only=True)
class ConformalRule(SegmentRule):
    """Accept rule that accepts a chunk if its p-value is above alpha."""

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

    Lossy: a chunk that is likely enough under the target is accepted unchanged. At alpha 1 no chunk
    is accepted, and the output is the target's. The calibration chunks are the first chunks of the
    run's first prompts. For chunks that are exchangeable with them, alpha is the rejection rate.
    Later chunks and other tasks are not exchangeable.
    Differs from the authors' code: the target replaces a rejected chunk, and keeps the tokens at
    its start that it would have generated itself. P-values are computed against the scores of the
    run's first prompts, not as ranks.

    One step:
    1. The draft model writes a chunk. After a rejection, the target writes the rest of the chunk.
    2. One target forward scores the chunk. The p-value of this score among the calibration scores
       decides whether the whole chunk is accepted.
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
        """The rule that decides whether a whole chunk is accepted."""
        return self.params.choose_rule(ConformalRule(alpha=self.params.alpha))

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one chunk after another."""
        segments = Segments(session, self.params.delimiter, self.params.cap)
        session.prefill()
        while session.finish is None:
            # Step 1: The draft writes a chunk. After a rejection, the target writes the rest of the
            # chunk.
            draft = segments.draft(self.params.length if segments.is_replacing else None)
            yield self.settle(session, segments, draft, session.score(draft))

    def settle(self, session: Session, segments: Segments, draft: Draft, rows: Tensor) -> Step:
        """Carry out step 2: accept or reject the chunk by its p-value; see the class."""
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
        """Decode the requests of a batch; `barrier` controls whether they wait for each other."""
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
