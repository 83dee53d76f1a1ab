"""A method with a trained head, which predicts the next tokens from the target's hidden states.

Authors: Title, venue and year, arXiv number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specbench_cli.api import (
    ArtifactSpec,
    Draft,
    FeatureHead,
    Field,
    Method,
    MethodParams,
    Session,
    best_tree,
    fill_from,
)


class SkeletonHeadModule(FeatureHead):
    """One small residual network per predicted position.

    Args:
        target: What a head may use of the target, such as `unembed`.
        levels: Number of predicted positions.
        inner: Width of the hidden layer.
    """

    kind = "skeleton-head"

    def __init__(self, target: Any, levels: int = 3, inner: int = 64) -> None:
        super().__init__(target, levels=levels, inner=inner)
        self.down = nn.ModuleList(nn.Linear(self.width, inner) for _ in range(levels))
        self.up = nn.ModuleList(nn.Linear(inner, self.width) for _ in range(levels))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of the predicted tokens.

        Args:
            rows: Hidden states of the target, [n, width].

        Returns:
            Logits [levels, n, vocab]. Level k predicts the token k + 2 positions after the row's
            token, because the target itself has already chosen the next one.
        """
        pairs = zip(self.down, self.up, strict=True)
        moved = [rows + up(torch.relu(down(rows))) for down, up in pairs]
        return self.target.unembed(torch.stack(moved))


class SkeletonHeadParams(MethodParams):
    """Parameters of `SkeletonHead`."""

    head: str = Field("auto", description="folder of the head")
    nodes: int = Field(16, ge=1, description="draft tokens per step, as a tree")


class SkeletonHead(Method):
    """SkeletonHead: a tree of the tokens that a small head finds likeliest.

    Lossless because the tree depends only on the text so far. Its tokens are chosen without a draw,
    and each is accepted with the target's own probability of it.

    One step:
    1. Read the target's hidden state at the last committed token.
    2. Predict the next tokens, and fill a fixed tree with the likeliest ones.
    3. (engine) One target forward over the last committed token and all nodes; verify; commit.
    """

    name = "skeleton-head"
    Params = SkeletonHeadParams
    params: SkeletonHeadParams
    needs = frozenset({"head"})

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the head's class and folder."""
        return (ArtifactSpec(SkeletonHeadModule, self.params.head),)

    def start(self, session: Session) -> None:
        """Capture the hidden states that the head reads, and reserve space for the tree."""
        self.head = session.artifact(*self.artifacts())
        session.capture_layers(self.head.captured_layers)
        self.tree = best_tree(self.params.nodes, depth=self.head.sizes["levels"])
        session.reserve(len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 and 2. The tree is cut at `limit` levels."""
        logits = self.head(session.features())[:, 0]
        return fill_from(self.tree, logits, session)
