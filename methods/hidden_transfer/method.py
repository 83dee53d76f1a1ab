"""Parallel Decoding via Hidden Transfer: pseudo hidden states of the next tokens.

Pengfei Wu, Jiahao Liu, Zhuocheng Gong, Qifan Wang, Jinpeng Li, Jingang Wang, Xunliang Cai, Dongyan
Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration,
arXiv:2404.12022.
"""

from __future__ import annotations

from typing import ClassVar

from methods.hidden_transfer.head import TransferMaps
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    best_tree,
    fill_from,
)


class HiddenTransferParams(MethodParams):
    """Parameters of `HiddenTransfer`."""

    head: str = Field(
        "auto",
        description="linear maps: auto (the default ones of the target), a folder or a hub id",
    )
    nodes: int = Field(
        16,
        ge=1,
        description="number of nodes of the tree, which is built from the ranks that are most"
        " likely to be accepted",
    )


class HiddenTransfer(Method):
    """Hidden Transfer: pseudo hidden states from a middle layer predict several tokens ahead.

    Lossless because no token attends to a pseudo hidden state, and the tree depends only on earlier
    tokens. A node is accepted with the probability that the target gives its token. In greedy
    decoding and coupled sampling (all methods share the Gumbel noise), it is accepted if and only
    if the target chooses the same token.
    Differs from the paper, whose code is not public: the pseudo hidden states of all steps start at
    the same layer L. The tree is built as in Medusa. Every node gets pseudo hidden states, because
    each node may be the last accepted one. No draft exceeds the remaining token budget.

    One step:
    1. The target's last forward also processed pseudo hidden states after the last accepted node.
       Pseudo hidden state k = 1, 2, ... predicts the token k places after the last committed token.
    2. The node of level k and rank r is the r-th best token of pseudo hidden state k, whatever its
       parent.
    3. (engine) Run the target's layers below L on the last committed token and the tree. W_k maps
       their output to the pseudo hidden states after each node.
    4. (engine) Run the layers from L on tokens and pseudo hidden states. A pseudo hidden state
       attends to the path to its node, to the node, and to earlier pseudo hidden states. No token
       attends to it. Verify; commit; drop the pseudo hidden states.
    """

    name: ClassVar[str] = "hidden-transfer"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("wu2024hidden",)
    Params: ClassVar[type[MethodParams]] = HiddenTransferParams
    params: HiddenTransferParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = TransferMaps
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes"})

    @property
    def batches(self) -> bool:
        """Return False, because a forward with pseudo hidden states supports only one request."""
        return False

    def start(self, session: Session) -> None:
        """Choose the draft tree, and add pseudo hidden states after its nodes (steps 3 and 4 of the
        class docstring).
        """
        maps = session.artifact(*self.artifacts())
        self.tree = best_tree(self.params.nodes, depth=maps.sizes["levels"])
        self.ahead = session.reserve(self.params.nodes, maps)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        return fill_from(self.tree, self.ahead.latest_logits(), session)
