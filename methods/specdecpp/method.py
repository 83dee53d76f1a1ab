"""SpecDec++: an adaptive draft length, chosen from the predicted probability of a rejection.

Kaixuan Huang, Xudong Guo, Mengdi Wang: SpecDec++: Boosting Speculative Decoding via Adaptive
Candidate Lengths, 2024, arXiv:2405.19715 (COLM 2025).
"""

from __future__ import annotations

import math
from typing import ClassVar

from methods.specdecpp.head import AcceptanceHead
from specbench_cli.api import (
    Artifact,
    Draft,
    DraftModelMethod,
    Field,
    MethodParams,
    Pick,
    Session,
    Tokens,
    host,
)


class SpecDecPPParams(MethodParams):
    """Parameters of `SpecDecPP`."""

    threshold: float = Field(
        0.3,
        ge=0,
        le=1,
        description="drafting stops when the probability of a rejection is above this value"
        " (stop_threshold)",
    )
    min: int = Field(
        2, ge=1, description="minimum number of draft tokens per step (bound in the authors' code)"
    )
    max: int = Field(
        20, ge=1, description="maximum number of draft tokens per step (bound in the authors' code)"
    )
    head: str = Field(
        "auto",
        description="acceptance head: auto (the default one of the draft model), a folder or a"
        " hub id",
    )


class SpecDecPP(DraftModelMethod):
    """SpecDec++: a trained head predicts acceptance; drafting stops once a rejection is likely.

    Lossless because the decision to draft another token depends only on the draft model. It never
    removes a token that is already drafted. Draft tokens therefore follow the distribution q that
    verification uses. The draft tokens are the same as those of the authors' code.

    One step. s is the predicted probability that all tokens drafted so far are accepted. It starts
    at 1:
    1. The draft model processes the newest token (for the first draft token, all pending tokens).
       Draw the next draft token x_i.
    2. The draft model now has a hidden state at x_{i-1}. Set s := s * head(hidden state). The
       newest token x_i is not scored yet.
    3. Draft another token while i < min, or while i < max and 1 - s <= threshold. An EOS ends the
       draft.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Drop the draft model's KV entries of rejected tokens.
    """

    name: ClassVar[str] = "specdec++"
    aliases: ClassVar[tuple[str, ...]] = ("specdecpp",)
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("huang2024specdecpp",)
    Params: ClassVar[type[SpecDecPPParams]] = SpecDecPPParams
    params: SpecDecPPParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    Head: ClassVar[type[Artifact]] = AcceptanceHead

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        super().start(session)
        (self.head,) = map(session.artifact, self.artifacts())
        self.eos = session.requests[0].stop.eos

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        params, picks, s = self.params, list[Pick](), 1.0
        x = session.pending_tokens(self.state.length())
        while len(picks) < limit:
            # Step 1: Draw x_i from q_i.
            out = self.model.forward(x, self.state)
            picks.append(session.pick(out, len(picks)))
            # Step 2: The forward for x_i processed x_{i-1}. Its last hidden state therefore
            # predicts whether x_{i-1} is accepted. On a GPU, the head starts before the CPU waits
            # for x_i.
            predicted = [self.head(out.hidden[0, -1:])] if len(picks) > 1 else []
            token, *probabilities = host.to_numbers(picks[-1][0], *predicted)
            s *= math.prod(probabilities)
            # Step 3: The probability of at least one rejection is 1 - s. x_i itself is always kept.
            rejection_likely = len(picks) >= params.min and 1 - s > params.threshold
            if rejection_likely or len(picks) >= params.max or token in self.eos:
                break
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)
