"""A method with a draft model, which drafts a chain of tokens.

Authors: Title, venue and year, arXiv number.
"""

from __future__ import annotations

from specbench_cli.api import (
    Draft,
    DraftModelMethod,
    Field,
    MethodParams,
    Pick,
    Session,
    Tokens,
)


class SkeletonDraftParams(MethodParams):
    """Parameters of `SkeletonDraft`."""

    length: int = Field(4, ge=1, description="draft tokens per step, one draft forward each")


class SkeletonDraft(DraftModelMethod):
    """SkeletonDraft: a small model drafts a chain, the target verifies it in one forward.

    Lossless because a draft token x from q is accepted with probability min(1, p(x)/q(x)), and a
    rejected one is replaced by a draw from norm(max(p - q, 0)).

    One step:
    1. Feed the draft model the tokens that its state does not contain yet.
    2. Pick `length` tokens, one forward each.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    4. (base class) Drop the state entries of rejected tokens.
    """

    name = "skeleton-draft"
    Params = SkeletonDraftParams
    params: SkeletonDraftParams
    needs = frozenset({"draft"})

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 and 2. The base class loads `model` and prefills `state`.

        Args:
            limit: Maximum number of draft tokens that still fit.
        """
        picks: list[Pick] = []
        x = session.pending_tokens(self.state.length())
        while len(picks) < min(limit, self.params.length):
            out = self.model.forward(x, self.state)
            # In greedy decoding, this picks the most likely token; otherwise it draws one. Never
            # draw tokens yourself, because verification needs the distribution that a token was
            # drawn from.
            picks.append(session.pick(out, len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)
