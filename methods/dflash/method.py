"""DFlash: a small block-diffusion model, conditioned on the target's hidden states, drafts a block.

Jian Chen, Yesheng Liang, Zhijian Liu: DFlash: Block Diffusion for Flash Speculative Decoding, 2026,
arXiv:2602.06036.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from methods.dflash.head import DFlashHead
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


class DFlashParams(MethodParams):
    """Parameters of `DFlash`."""

    length: int = Field(
        15,
        ge=1,
        description="maximum number of draft tokens per step; at most the head's block size"
        " minus 1",
    )
    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )


class DFlash(Method):
    """DFlash: a block of masks, conditioned on the target's features, is denoised in one forward.

    Lossless because each draft token x is drawn from the distribution q at its own position. q
    depends on the committed text and on no other draft token. Speculative sampling accepts x with
    probability min(1, p(x)/q(x)), where p is the target's distribution. It replaces a rejected
    token by a draw from norm(max(p - q, 0)). In greedy decoding and coupled sampling (all methods
    share the Gumbel noise) a draft token is accepted if and only if the target chooses it.
    Differs from the authors' code: near the end of the token budget the whole block is denoised, as
    in training, and only the tokens that fit the budget are proposed.

    One step:
    1. The head reads the target's hidden states of new committed tokens, from several layers. They
       become keys and values in every layer of the head.
    2. In the same forward, denoise a block: the last committed token followed by masks. All
       positions attend to these keys and values and to each other, in both directions. Drop the
       keys and values of the block.
    3. Draw one draft token from the distribution at each mask.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "dflash"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("chen2026dflash",)
    Params: ClassVar[type[MethodParams]] = DFlashParams
    params: DFlashParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = DFlashHead
    paper_params: ClassVar[Mapping[str, Any]] = {"length": 15}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Capture the hidden states that the head reads."""
        self.head = head = session.artifact(*self.artifacts())
        session.capture_layers(head.captured_layers)
        self.state = session.new_state(head)
        self.masks = torch.full((1, head.block - 1), head.mask, device=session.device)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        n = min(self.params.length, self.head.block - 1, limit)
        if n < 1:
            return session.chain(())
        # Steps 1 and 2: The block starts with the last committed token. The target has not computed
        # the hidden state of this token yet.
        pending = session.pending_features(self.state.length())
        x = Features(torch.cat((pending.ids, self.masks), 1), pending.rows)
        logits = self.head.forward(x, self.state, logits_at="all").rows
        # Step 3: Skip row 0. It belongs to the last committed token, which is already known.
        return draw_chain(session, logits[1 : n + 1])
