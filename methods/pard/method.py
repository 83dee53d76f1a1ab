"""PARD: a draft model that predicts several tokens in one forward, at mask tokens.

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

    length: int = Field(
        8, ge=1, description="number of draft tokens per step, all from one forward"
    )
    head: str = Field(
        "auto",
        description="adapted draft model: auto (the default one of the target), a folder or a"
        " hub id",
    )


class Pard(Method):
    """PARD: a draft model adapted to mask tokens drafts a whole chain in one forward.

    Lossless because each token is drawn from the distribution q at its own position, which depends
    on the committed text and on no other draft token. A token x is accepted with probability min(1,
    p(x)/q(x)), where p is the target's distribution. A rejected token is replaced by a draw from
    norm(max(p - q, 0)). In greedy decoding and coupled sampling (all methods share the Gumbel
    noise) a draft token is accepted if and only if the target chooses it.
    Differs from the authors' code, which supports only greedy decoding. No draft exceeds the
    remaining token budget. The parameter `pard.head` sets the draft model. It is independent of the
    run's draft model.

    One step:
    1. The draft model processes its pending tokens, followed by `length` - 1 mask tokens.
    2. Draw one token at the last committed token and one at each mask. Mask k = 1, 2, ... predicts
       the token k + 1 places after the last committed token.
    3. Drop the masks' KV entries. Only committed tokens stay in the KV cache.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "pard"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("an2025pard",)
    Params: ClassVar[type[MethodParams]] = PardParams
    params: PardParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = PardDraft
    paper_params: ClassVar[Mapping[str, Any]] = {"length": 12}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Prefill the draft model with the prompt."""
        self.model = session.artifact(*self.artifacts())
        self.state = session.new_state(self.model, slack=self.params.length)
        self.masks = torch.full((1, self.params.length - 1), self.model.mask, device=session.device)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        n = min(self.params.length, limit)
        if n < 1:
            return session.chain(())
        # Step 1: Run one causal forward over the pending tokens and n - 1 masks.
        pending, text = session.pending_tokens(self.state.length()).ids, len(session.tokens())
        x = Tokens(torch.cat((pending, self.masks[:, : n - 1]), 1))
        logits = self.model.forward(x, self.state, logits_at="all").rows[-n:]
        # Step 2: Draw each token from the distribution at its own position. It does not depend on
        # the other draft tokens.
        draft = draw_chain(session, logits)
        # Step 3: Drop the masks. The next step feeds the accepted tokens in their place.
        self.state.rollback(0, text)
        return draft
