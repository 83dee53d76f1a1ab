"""PARD: a draft model that says several tokens in one forward, through mask tokens.

Zihao An, Huajun Bai, Ziqiong Liu, Dong Li, Emad Barsoum: PARD: Accelerating LLM Inference with
Low-Cost PARallel Draft Model Adaptation, 2025, arXiv:2504.18583.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from methods.pard.head import PardDraft
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    Tokens,
    draw_chain,
)


class PardParams(MethodParams):
    """Parameters of `Pard`."""

    length: int = Field(8, ge=1, description="draft tokens a step, all in one forward")
    head: str = Field("auto", description="auto: the target's own adapted draft; else its folder")


class Pard(Method):
    """PARD: a draft model adapted to mask tokens says a whole chain in one forward.

    Exact because each token is drawn from its row's distribution q, which knows the committed text
    and no other draft token, and stands with probability min(1, p(x)/q(x)); a rejected one is
    replaced by a draw from norm(max(p - q, 0)). In greedy and coupled decoding a draft token stands
    iff it is the target's own choice.
    Differs from the authors' code: theirs compares likeliest tokens alone, which is greedy
    decoding; nothing is drafted past the budget; the draft is a module that belongs to the target
    (`pard.head`) beside the run's draft model, whichever that is.

    One step:
    1. Behind the committed tokens that the draft has not seen, feed it `length` - 1 mask tokens.
    2. Draw a token from the row of the last committed token, and one from each mask's: the mask k
       places behind that token says the token k + 1 places behind it.
    3. Forget the masks' rows: only committed tokens leave rows, each fed as itself.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "pard"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("an2025pard",)
    Params: ClassVar[type[MethodParams]] = PardParams
    params: PardParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = PardDraft
    paper: ClassVar[Mapping[str, Any]] = {"length": 12}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Prefill the draft."""
        self.model = session.artifact(*self.artifacts())
        self.state = session.new_state(self.model, slack=self.params.length)
        self.masks = torch.full((1, self.params.length - 1), self.model.mask, device=session.device)
        self.model.forward(session.since(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 to 3."""
        n = min(self.params.length, limit)
        if n < 1:
            return session.chain(())
        # 1. x_1 ... x_t m_1 ... m_{n-1}: one causal forward, whatever n is.
        unseen, text = session.since(self.state.length()).ids, len(session.tokens())
        x = Tokens(torch.cat((unseen, self.masks[:, : n - 1]), 1))
        said = self.model.forward(x, self.state, logits_at="all").rows[-n:]
        # 2. Each from its own row: x_{t+2} does not know which x_{t+1} was drawn.
        draft = draw_chain(session, said)
        # 3. What was a mask is fed as a token once it is one.
        self.state.rollback(0, text)
        return draft
