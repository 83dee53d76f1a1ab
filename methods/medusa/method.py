"""Medusa: several decoding heads on the target's last hidden state.

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

    head: str = Field(
        "auto",
        description="draft heads: auto (the default ones of the target), a folder or a hub id",
    )
    nodes: int = Field(
        len(MC_SIM_7B_63),
        ge=1,
        description="number of nodes of the tree; 63 is the tree of the authors' code,"
        " mc_sim_7b_63",
    )


class Medusa(Method):
    """Medusa: each head predicts one of the next tokens, and their candidates fill a static tree.

    Lossless because the tree depends only on earlier tokens. A node is one of its head's most
    likely tokens, not drawn at random. A node is accepted with the probability that the target
    gives its token. In greedy decoding and coupled sampling (all methods share the Gumbel noise),
    it is accepted if and only if the target chooses the same token. `accept=typical` is the paper's
    rule at temperatures above zero. It is not exact, and specbench reports it as lossy.
    Differs from the authors' code: without typical acceptance, verification and the first token of
    a step use the target's own distribution. No draft exceeds the remaining token budget.

    One step:
    1. All heads read the target's hidden state that predicted the last committed token. Head k = 1,
       2, ... predicts the token k places after this token, independently of the other heads.
    2. The node of level k and rank r is the r-th best token of head k, whatever its parent.
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
        """Choose the draft tree, reserve space for it, and capture the hidden states that the heads
        read.
        """
        self.heads = session.artifact(*self.artifacts())
        session.capture_layers(self.heads.captured_layers)
        nodes, authors = self.params.nodes, len(MC_SIM_7B_63)
        name = "mc_sim_7b_63" if nodes == authors else self.params.tree
        self.tree = static_tree(name, nodes, self.heads.sizes["levels"])
        session.reserve(len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        logits = self.heads(session.features())[:, 0]  # [levels, V]
        return fill_from(self.tree, logits, session)
