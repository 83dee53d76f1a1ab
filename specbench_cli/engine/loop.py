"""The draft-verify loop that drives every method which only proposes and observes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome, Step
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.errors import MethodFault


class Proposer(Protocol):
    """The part of a method that the loop drives; `accept`, its accept rule, may be left out."""

    def start(self, session: Session) -> None:
        """Get ready for a prompt."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose a continuation of at most `limit` levels."""

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Learn what was committed."""


class BatchProposer(Proposer, Protocol):
    """A proposer of several sequences that are decoded together, each by an object of its own."""

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Propose for all sequences of a batch; called on one of their methods."""


@torch.inference_mode()  # which every operation is cheaper for, not forwards alone
def draft_and_verify(method: Proposer, session: Session) -> Iterator[Step]:
    """Decode one request; yields every step, prefill being none.

    Raises:
        MethodFault: a malformed draft; says the method, the step, the field and what is allowed.
    """
    # 1. Prefill: the draft's, then the target's, which commits the first token.
    method.start(session)
    session.prefill()
    while session.finish is None:
        # 2. Draft.
        draft = method.propose(session, session.room())
        # 3. Score the draft in one target forward and verify it.
        try:
            outcome = session.verify(draft, session.score(draft), *_accept(method))
        except MethodFault as fault:
            raise _named(method, fault) from None
        # 4. Commit what stands, up to the end of the output.
        committed = session.commit(outcome)
        method.observe(session, committed)
        yield session.step(draft, committed)


@torch.inference_mode()
def draft_and_verify_batch(methods: Sequence[BatchProposer], batch: Batch) -> Iterator[Step]:
    """Decode the requests of a batch together, with a method object each; the steps of
    `draft_and_verify`, a sequence after another.

    Raises:
        MethodFault: a malformed draft.
    """
    # 1. Prefill: the drafts', then the target's in one forward.
    members = list(zip(methods, batch.sessions, strict=True))
    for method, session in members:
        method.start(session)
    batch.prefill()
    batch.forwards()
    place = {session: at for at, session in enumerate(batch.sessions)}
    while live := [each for each in members if each[1].finish is None]:
        # 2. Draft: one after another, or in the method's own way for all at once.
        drafts = live[0][0].propose_batch(live)
        # 3. One target forward over all drafts.
        pairs = [(session, draft) for (_, session), draft in zip(live, drafts, strict=True)]
        try:
            rows = batch.score(pairs)
            forwards = batch.forwards()
            for (method, session), draft, logits in zip(live, drafts, rows, strict=True):
                outcome = session.verify(draft, logits, *_accept(method))
                # 4. Commit; what has come to its end leaves.
                committed = session.commit(outcome)
                method.observe(session, committed)
                yield Step(place[session], draft, committed, forwards)
        except MethodFault as fault:
            raise _named(live[0][0], fault) from None


def _accept(method: Proposer) -> tuple[AcceptRule, ...]:
    """The method's accept rule, if it has one."""
    rule: AcceptRule | None = getattr(method, "accept", None)
    return () if rule is None else (rule,)


def _named(method: Proposer, fault: MethodFault) -> MethodFault:
    """A fault in a draft that names the method."""
    name = getattr(method, "name", type(method).__name__)
    return type(fault)(f"{name}, {fault.message}", fault.hint)
