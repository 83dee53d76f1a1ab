"""Medusa: several decoding heads on the target's last row.

Tianle Cai, Yuhong Li, Zhengyang Geng, Hongwu Peng, Jason D. Lee, Deming Chen, Tri Dao: Medusa:
Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024,
arXiv:2401.10774.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods._heads.trees import MC_SIM_7B_63, TreeParams, static_tree
from methods.medusa.head import MedusaHeads
from specbench_cli.api import (
    AcceptParams,
    Artifact,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    fill_from,
)


class MedusaParams(AcceptParams, TreeParams):
    """Parameters of `Medusa`."""

    head: str = Field("auto", description="auto: the target's own; else the folder of them")
    nodes: int = Field(
        len(MC_SIM_7B_63), ge=1, description="size of the tree; 63 is the authors', mc_sim_7b_63"
    )


class Medusa(Method):
    """Medusa: heads on the target's last row, each one token further ahead, fill a static tree.

    Exact because the tree is a function of the past: a node is its head's token of some rank, which
    stands with the target's own probability of it, and in greedy and coupled decoding iff it is the
    target's own choice. With `accept=typical` it is the paper's method at temperatures above zero,
    which is not exact, and is not said to be.
    Differs from the authors' code: without typical acceptance, verification is the target's own
    distribution; the first token of a step is drawn, never the likeliest one whatever the
    temperature; nothing is drafted past the budget.

    One step:
    1. From the target's row that the last committed token was chosen from, head k says the token k
       places behind that token, for all k at once, and none of what the others say.
    2. A node of level k and rank r holds the r-th best token of head k, whatever its parent.
    3. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "medusa"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("cai2024medusa",)
    Params: ClassVar[type[MethodParams]] = MedusaParams
    params: MedusaParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = MedusaHeads
    paper_params: ClassVar[Mapping[str, Any]] = {"nodes": 63}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes"})

    def start(self, session: Session) -> None:
        """Choose the tree, make room for it, and have the target keep the rows that heads read."""
        self.heads = session.artifact(*self.artifacts())
        session.capture_layers(self.heads.taps)
        nodes, authors = self.params.nodes, len(MC_SIM_7B_63)
        name = "mc_sim_7b_63" if nodes == authors else self.params.tree
        self.tree = static_tree(name, nodes, self.heads.sizes["levels"])
        session.reserve(len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        logits = self.heads(session.features())[:, 0]  # [levels, V]
        return fill_from(self.tree, logits, session)
