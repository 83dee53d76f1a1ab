"""Medusa: several decoding heads on the target's last row.

Tianle Cai, Yuhong Li, Zhengyang Geng, Hongwu Peng, Jason D. Lee, Deming Chen, Tri Dao: Medusa:
Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024,
arXiv:2401.10774.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods._heads.medusa import MedusaHeads
from specbench_cli.api import (
    AcceptParams,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    Trained,
    best_tree,
    fill_from,
    tree_of_choices,
)

AUTHORS = tree_of_choices(
    tuple(map(int, ranks))
    for ranks in (
        "0 1 2 3 4 5 6 7 8 9  00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40"
        "  50 60 70 80 90  000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050"
        "  060 070 100 101 200  0000 0001"
    ).split()
)
"""The tree of the authors' code for heads of 7B models: each node by the ranks on its path."""


class MedusaParams(AcceptParams, MethodParams):
    """Parameters of `Medusa`."""

    head: str = Field("auto", description="auto: the target's own; else the folder of them")
    nodes: int = Field(
        len(AUTHORS.nodes),
        ge=1,
        description="size of the tree; 63 is the authors', others are made of the likeliest ranks",
    )


class Medusa(Method):
    """Medusa: heads on the target's last row, each one token further ahead, fill a static tree.

    Exact because the tree is a function of the past: a node is its head's token of some rank, which
    stands with the target's own probability of it, and in greedy and coupled decoding iff it is the
    target's own choice. With `accept=typical` it is the paper's method at temperatures above zero,
    which is not exact, and is not said to be.
    Differs from the authors' code: without typical acceptance, verification is the target's own
    law; the first token of a step is drawn, never the likeliest one whatever the temperature;
    nothing is drafted past the budget.

    One step:
    1. From the target's row that the last committed token was chosen from, head k says the token k
       places behind that token, for all k at once, and none of what the others say.
    2. A node of level k and rank r holds the r-th best token of head k, whatever its parent.
    3. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "medusa"
    Params: ClassVar[type[MethodParams]] = MedusaParams
    params: MedusaParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    paper: ClassVar[Mapping[str, Any]] = {"nodes": 63}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes"})

    def artifacts(self) -> tuple[Trained, ...]:
        """The heads."""
        return (Trained(MedusaHeads, self.params.head),)

    def start(self, session: Session) -> None:
        """Choose the tree, make room for it, and have the target keep the rows that heads read."""
        self.heads = session.artifact(*self.artifacts())
        session.tap(self.heads.taps)
        whole = best_tree(self.params.nodes, depth=self.heads.sizes["levels"])
        self.tree = AUTHORS if self.params.nodes == len(AUTHORS.nodes) else whole
        session.reserve(len(self.tree.nodes))

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        logits = self.heads(session.features())[:, 0]  # [levels, V]
        return fill_from(self.tree, logits, session)
