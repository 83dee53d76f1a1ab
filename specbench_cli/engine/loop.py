"""The standard draft-verify loop, for one request and for batches.

Methods that override `Method.generate` do not use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome, Step
from specbench_cli.engine.verify import hooks
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.errors import MethodFault


class Proposer(Protocol):
    """The part of a method that the decoding loop calls.

    A method may also have an accept rule, the attribute `accept`.
    """

    def start(self, session: Session) -> None:
        """Prepare for a prompt."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose a draft with at most `limit` levels."""

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Update the method after verification. Return the method's own counts, if it has any."""


class BatchProposer(Proposer, Protocol):
    """The part of a method that the loop for batches calls. Each sequence has its own object."""

    def schedule(
        self, members: Sequence[tuple[Self, Session]], size: int
    ) -> Sequence[tuple[Self, Session]]:
        """Choose at most `size` sequences for the next step.

        The engine calls it on the method object of the first sequence.
        """

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Propose a draft for each sequence of a batch.

        The engine calls it on the method object of the first sequence.
        """


@torch.inference_mode()  # makes every operation cheaper, not only forwards
def draft_and_verify(method: Proposer, session: Session) -> Iterator[Step]:
    """Decode one request. Yield a step for each round of drafting and verification after the
    prefill.

    Raises:
        MethodFault: A draft is malformed. The message names the method, the step, the field and the
            allowed values.
    """
    # 1. Prefill: first the draft model, then the target. The target's prefill commits the first
    # token.
    method.start(session)
    session.prefill()
    while session.finish is None:
        # 2. Let the method draft.
        proposed = method.propose(session, session.max_draft_length())
        draft = hooks.check_return(method, "propose", proposed, Draft, "a Draft")
        # 3. Score the draft in one target forward, and verify the draft from the logits.
        try:
            outcome = session.verify(draft, session.score(draft), *_accept_rules(method))
        except MethodFault as fault:
            raise _with_method_name(method, fault) from None
        # 4. Commit the accepted tokens, up to the end of the output.
        committed = session.commit(outcome)
        counts = hooks.check_counts(method, method.observe(session, committed))
        yield session.step(draft, committed, **counts)


@torch.inference_mode()
def draft_and_verify_batch(methods: Sequence[BatchProposer], batch: Batch) -> Iterator[Step]:
    """Decode the requests of a batch together. Yield the steps of each sequence.

    Args:
        methods: One method object for each session of the batch.

    Raises:
        MethodFault: A draft is malformed, or the method chose an invalid set of sequences.
    """
    method_of = dict(zip(batch.sessions, methods, strict=True))
    place = {session: at for at, session in enumerate(batch.sessions)}
    while not batch.finished:
        # 1. Finished sequences leave the batch. Waiting sequences join it and prefill the draft
        # model. The target processes their prompts in step 3, or immediately if no sequence is
        # being decoded.
        batch.join(lambda session: method_of[session].start(session))
        active = [(method_of[session], session) for session in batch.active]
        if not active:
            batch.prefill()
            continue
        # 2. Choose the sequences of this step, and let the method draft for them.
        first = active[0][0]
        members = hooks.check_members(first, first.schedule(active, batch.size))
        _check_schedule(members, active, batch.size)
        for _, session in members:
            session.harness.batch_sessions = [other for _, other in members]
        first = members[0][0]
        drafts = hooks.check_drafts(first, first.propose_batch(members), len(members))
        # 3. Run one target forward over all drafts and over the next prompt tokens of new
        # sequences.
        pairs = [(session, draft) for (_, session), draft in zip(members, drafts, strict=True)]
        try:
            rows = batch.score(pairs)
            outcomes = [
                session.verify(draft, logits, *_accept_rules(method))
                for (method, session), draft, logits in zip(members, drafts, rows, strict=True)
            ]
            forwards = batch.forwards()
            for (method, session), draft, outcome in zip(members, drafts, outcomes, strict=True):
                # 4. Commit the accepted tokens of each sequence.
                committed = session.commit(outcome)
                counts = hooks.check_counts(method, method.observe(session, committed))
                yield Step(place[session], draft, committed, forwards, counts)
        except MethodFault as fault:
            raise _with_method_name(members[0][0], fault) from None
    batch.leave()


def _check_schedule(
    members: Sequence[tuple[BatchProposer, Session]],
    active: Sequence[tuple[BatchProposer, Session]],
    size: int,
) -> None:
    chosen, allowed = [session for _, session in members], {session for _, session in active}
    if not 1 <= len(chosen) <= size or len(set(chosen)) < len(chosen) or not allowed >= {*chosen}:
        raise MethodFault(
            f"{type(active[0][0]).__name__}, `schedule`: invalid choice of {len(chosen)} sequences"
            f" out of {len(active)}",
            f"return 1 to {size} different `members`",
        )


def _accept_rules(method: Proposer) -> tuple[AcceptRule, ...]:
    """Return a tuple with the method's accept rule, or an empty tuple if it has none."""
    rule: AcceptRule | None = getattr(method, "accept", None)
    return () if rule is None else (rule,)


def _with_method_name(method: Proposer, fault: MethodFault) -> MethodFault:
    """Return the error with the name of the method at the beginning of its message."""
    name = getattr(method, "name", type(method).__name__)
    return type(fault)(f"{name}, {fault.message}", fault.hint)
