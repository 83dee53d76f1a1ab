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
    """Return (1 + number of known scores at least as bad) / (n + 1).

    Args:
        known: n scores, sorted with the best first.
    """
    return (1 + len(known) - bisect_left(known, score)) / (1 + len(known))


@dataclass(frozen=True, kw_only=True)
class ConformalRule(SegmentRule):
    """Accept rule: accepts a chunk if its p-value is above alpha."""

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
    """ATTS: the draft writes chunks; the target rewrites the share that it finds least likely.

    Lossy: a chunk that is not unusual for the target is accepted unchanged. At alpha 1 no chunk is
    accepted, and the output is the target's. Alpha is the rejection rate of chunks that are
    exchangeable with the calibration chunks, which are the first chunks of prompts. Later chunks
    and other tasks are not exchangeable with these.
    Differs from the authors' code: the target replaces a rejected chunk, and keeps the tokens at
    its start that it would have generated itself. P-values are computed against the scores of the
    run's first prompts, not as ranks.

    One step:
    1. The draft model writes a chunk. After a rejection, the target writes the rest of the chunk.
    2. One target forward scores the chunk. Its p-value among the known scores decides whether it
       is accepted as a whole.
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
        """Return the rule that accepts a whole chunk."""
        return self.params.choose_rule(ConformalRule(alpha=self.params.alpha))

    @torch.inference_mode()
    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, one chunk after another."""
        spans = Segments(session, self.params.delimiter, self.params.cap)
        session.prefill()
        while session.finish is None:
            # 1. The draft writes a chunk. After a rejection, the target writes the rest of the
            # chunk.
            draft = spans.draft(self.params.length if spans.is_replacing else None)
            yield self.settle(session, spans, draft, session.score(draft))

    def settle(self, session: Session, spans: Segments, draft: Draft, rows: Tensor) -> Step:
        """Carry out step 2: accept or reject the chunk by its p-value."""
        if spans.is_replacing or not draft.nodes:
            return spans.verify_and_commit(draft, rows)
        rule = self.accept
        if (grade := rule.random_grade(session.random, rows)) is None:
            known, score = session.memory.setdefault("scores", []), -mean_log_prob(rows, draft)
            grade = p_value(score, known)
            if not spans.num_judged and len(known) < self.params.known:
                insort(known, score)
        rule = rule.judge(grade)
        return spans.verify_and_commit(draft, rows, rule, spans=1, stood=rule.accepted, grade=grade)

    def generate_batch(self, batch: Batch) -> Iterator[Step]:
        """Decode several requests, each alone or with a barrier after each chunk (`barrier`)."""
        of, par = dict[Session, Segments](), self.params
        while not batch.finished:
            batch.join(lambda each: of.update({each: Segments(each, par.delimiter, par.cap)}))
            late = [each for each in batch.active if of[each].is_replacing]
            due = late if par.barrier and late else batch.active
            if not due:
                batch.prefill()
                continue
            drafts = [(s, of[s].draft(par.length if of[s].is_replacing else None)) for s in due]
            rows, forwards = batch.score(drafts), batch.forwards()
            for (each, draft), own in zip(drafts, rows, strict=True):
                step = self.settle(each, of[each], draft, own)
                yield replace(step, seq=batch.sessions.index(each), forwards=forwards)
        batch.leave()
