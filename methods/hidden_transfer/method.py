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

    head: str = Field("auto", description="auto: the target's own maps; else the folder of them")
    nodes: int = Field(16, ge=1, description="size of the tree, made of the likeliest ranks")


class HiddenTransfer(Method):
    """Hidden Transfer: pseudo hidden states from a middle layer predict several tokens ahead.

    Exact because no row of the text sees a pseudo state, and the tree is a function of the past: a
    node is a step's token of some rank, which stands with the target's own probability of it, and
    in greedy and coupled decoding iff it is the target's own choice.
    Differs from the paper, whose code is not public: all steps leave the same layer; the tree is
    Medusa's construction; every node has pseudo states, since each may be the last that stands;
    nothing is drafted past the budget.

    One step:
    1. Pseudo states behind the last node that stood went through the target's last forward: step k
       says the token k places behind the last committed one.
    2. A node of level k and rank r holds the r-th best token of step k, whatever its parent.
    3. (engine) The target's layers below L run over the last committed token and the tree. W_k maps
       what leaves them to the pseudo states behind each node.
    4. (engine) The layers from L on run over both; a pseudo state sees the path to its node, the
       node and those before it, and is seen by none of the text. Verify, commit, keep no pseudo
       state.
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
        """No: a forward with pseudo states is one request's."""
        return False

    def start(self, session: Session) -> None:
        """Choose the tree, and have pseudo states stand behind its nodes (steps 3 and 4)."""
        maps = session.artifact(*self.artifacts())
        self.tree = best_tree(self.params.nodes, depth=maps.sizes["levels"])
        self.ahead = session.reserve(self.params.nodes, maps)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        return fill_from(self.tree, self.ahead.latest_logits(), session)
