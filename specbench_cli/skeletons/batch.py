"""A method with a draft model, which drafts for all sequences of a batch together.

Authors: Title, venue and year, arXiv number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from specbench_cli.api import (
    Draft,
    Field,
    Method,
    MethodParams,
    Outcome,
    Pick,
    Session,
    Tokens,
)


class SkeletonBatchParams(MethodParams):
    """Parameters of `SkeletonBatch`."""

    length: int = Field(4, ge=1, description="draft tokens per step and sequence")


class SkeletonBatch(Method):
    """SkeletonBatch: one draft forward adds a draft token to every sequence of the batch.

    Lossless because each sequence is drafted and verified as if it were alone: a draft token x from
    q is accepted with probability min(1, p(x)/q(x)).

    One step (with `--batch N`, of up to N sequences):
    1. Feed the draft model the pending tokens of every sequence.
    2. Pick one token for each sequence per forward, up to `length`.
    3. (engine) One target forward over all sequences; verify and commit each.
    4. Drop the state entries of rejected tokens.
    """

    name = "skeleton-batch"
    Params = SkeletonBatchParams
    params: SkeletonBatchParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Create an empty state. The first step feeds it the prompts of all sequences together."""
        self.model = session.draft()
        self.state = session.new_state(self.model)

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 and 2 for a single sequence."""
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Carry out steps 1 and 2.

        Args:
            members: The sequences of the batch, each with its own object of this class.

        Returns:
            One draft per member, in the same order.
        """
        picks: list[list[Pick]] = [[] for _ in members]
        x = [session.pending_tokens(method.state.length()) for method, session in members]
        for position in range(self.params.length):
            # A sequence near its token limit has room for fewer draft tokens than the other
            # sequences.
            active = [
                at for at, (_, own) in enumerate(members) if position < own.max_draft_length()
            ]
            if not active:
                break
            inputs = [members[at][1].batch_input(x[at], members[at][0].state) for at in active]
            for at, out in zip(active, self.model.forward_batch(inputs), strict=True):
                picks[at].append(members[at][1].pick(out, position))
                x[at] = Tokens(picks[at][-1][0][None])
        return [own.chain_of_picks(chain) for (_, own), chain in zip(members, picks, strict=True)]

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Carry out step 4. The last committed token has no state entry yet."""
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
