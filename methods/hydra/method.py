"""Hydra: draft heads that read what was drafted before.

Zachary Ankner, Rishab Parthasarathy, Aniruddha Nrusimha, Christopher Rinard, Jonathan Ragan-Kelley,
William Brandon: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from methods._heads.trees import TreeParams, static_tree
from methods.hydra.head import HydraHeads
from specbench_cli.api import (
    AcceptParams,
    Artifact,
    Draft,
    DrawMode,
    Field,
    HeadLevels,
    Method,
    MethodParams,
    Session,
    fill,
)


class HydraParams(AcceptParams, TreeParams):
    """Parameters of `Hydra`."""

    head: str = Field("auto", description="auto: the target's own; else the folder of them")
    nodes: int = Field(63, ge=1, description="size of the tree")
    width: int = Field(10, ge=1, le=10, description="most children of a node")
    children: Literal["likeliest", "drawn"] = Field(
        "likeliest", description="or drawn without replacement, where tokens are drawn at all"
    )


class Hydra(Method):
    """Hydra: heads on the target's last row and the tokens drafted so far fill a static tree.

    Exact because the tree is a function of the past, and in coupled decoding of the noise that the
    target shares: a node is one of the likeliest tokens at its parent, which stands with the
    target's own probability of it, and in greedy and coupled decoding iff it is the target's own
    choice. With `children=drawn`, under rejection, siblings are drawn without replacement from the
    head's distribution and tested in that order. With `accept=typical` it is the paper's method at
    temperatures above zero, which is not exact, and is not said to be.
    Differs from the authors' code: without typical acceptance, verification is the target's own
    distribution; the first token of a step is drawn, never the likeliest one whatever the
    temperature; the tree is Medusa's construction, or theirs (`tree`); nothing is drafted past the
    budget; in coupled decoding the heads' scores carry the target's noise.

    One step:
    1. Head 1 reads the target's row that the last committed token was chosen from, and that token.
    2. Level by level, take the children that the tree names from the head's ranking at their
       parent. Head k + 1 reads, at each node of level k that has children, the target's row, the
       last committed token and all tokens on the node's path: one call for the nodes of a level.
    3. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "hydra"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("ankner2024hydra",)
    Params: ClassVar[type[MethodParams]] = HydraParams
    params: HydraParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = HydraHeads
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "width"})

    def start(self, session: Session) -> None:
        """Choose the tree, make room for it, and have the target keep the rows that heads read."""
        heads = session.artifact(*self.artifacts())
        session.tap(heads.taps)
        width, depth = min(self.params.width, session.target.vocab_size), heads.sizes["levels"]
        self.tree = static_tree(self.params.tree, self.params.nodes, depth, width)
        session.reserve(len(self.tree.nodes))
        self.levels = HeadLevels(session, heads)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        tree = self.tree.truncate(limit, self.params.width)
        if not tree.nodes:
            return session.chain(())
        how: DrawMode = (
            "deterministic" if self.params.children == "likeliest" else "without_replacement"
        )
        # Nodes are fed by their path: what was read at their parents, and themselves.
        return fill(tree, self.levels, self.levels.begin(), session, how=how).draft
