"""P-EAGLE: EAGLE-3's head drafts all tokens of a chain at once.

Mude Hui, Xin Huang, Jaime Campos Salas, Yue Sun, Nathan Pemberton, Xiang Song, Ashish Khetan,
George Karypis: P-EAGLE: Parallel-Drafting EAGLE with Scalable Training, 2026, arXiv:2602.01469.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from methods.peagle.head import PEagleHead
from specbench_cli.api import (
    Artifact,
    Draft,
    Features,
    Field,
    Method,
    MethodParams,
    Session,
    draw_chain,
)


class PEagleParams(MethodParams):
    """Parameters of `PEagle`."""

    length: int = Field(
        5,
        ge=1,
        description="number of draft tokens per step, all from one forward (K in the paper)",
    )
    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )


class PEagle(Method):
    """P-EAGLE: EAGLE-3's head with masks after the text drafts a whole chain in one forward.

    Lossless because each token is drawn from the distribution q at its own position, which depends
    on the committed text and on no other draft token. A token x is accepted with probability min(1,
    p(x)/q(x)), where p is the target's distribution. A rejected token is replaced by a draw from
    norm(max(p - q, 0)). In greedy decoding and coupled sampling (all methods share the Gumbel
    noise) a draft token is accepted if and only if the target chooses it. Tokens outside the head's
    draft vocabulary are never drafted.
    Differs from the paper: heads have one layer. No draft exceeds the remaining token budget.

    One step:
    1. The head reads the new committed tokens, each with the target's features of the previous
       token from a low, a middle and a high layer. In the same forward it reads `length` - 1 masks.
       A mask is the mask token with a learned vector in place of the unknown hidden states.
    2. Draw one token at the last committed token and one at each mask. Mask k = 1, 2, ... predicts
       the token k + 1 places after the last committed token.
    3. (in the head) Drop the masks' KV entries.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "p-eagle"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("hui2026peagle",)
    Params: ClassVar[type[MethodParams]] = PEagleParams
    params: PEagleParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = PEagleHead
    paper_params: ClassVar[Mapping[str, Any]] = {"length": 7}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Capture the hidden states that the head reads."""
        self.head = session.artifact(*self.artifacts())
        session.capture_layers(self.head.captured_layers)
        self.state = session.new_state(self.head, slack=self.params.length)
        shape = 1, self.params.length - 1
        self.masks = torch.full(shape, self.head.mask, device=session.device)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        n = min(self.params.length, limit)
        if n < 1:
            return session.chain(())
        pending = session.pending_features(self.state.length())
        x = Features(torch.cat((pending.ids, self.masks[:, : n - 1]), 1), pending.rows)
        logits = self.head.forward(x, self.state, logits_at="all").rows
        return draw_chain(session, logits)
