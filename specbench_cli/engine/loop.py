"""The draft-verify loop that drives every method which only proposes and observes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome, Step
from specbench_cli.errors import MethodFault


class Proposer(Protocol):
    """The part of a method that the loop drives."""

    def start(self, session: Session) -> None:
        """Get ready for a prompt."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose a continuation of at most `limit` levels."""

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Learn what was committed."""


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
            outcome = session.verify(draft, session.score(draft))
        except MethodFault as fault:
            name = getattr(method, "name", type(method).__name__)
            raise MethodFault(f"{name}, {fault.message}", fault.hint) from None
        # 4. Commit what stands, up to the end of the output.
        committed = session.commit(outcome)
        method.observe(session, committed)
        yield session.step(draft, committed)
