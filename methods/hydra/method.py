"""Hydra: draft heads that read the tokens drafted so far.

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

    head: str = Field(
        "auto",
        description="draft heads: auto (the default ones of the target), a folder or a hub id",
    )
    nodes: int = Field(63, ge=1, description="number of nodes of the tree (authors' tree: 63)")
    width: int = Field(10, ge=1, le=10, description="maximum number of children of a node")
    children: Literal["likeliest", "drawn"] = Field(
        "likeliest",
        description="in sampling: take the most likely tokens as children (likeliest), or draw"
        " them without replacement (drawn)",
    )


class Hydra(Method):
    """Hydra: heads on the target's last hidden state and the drafted tokens fill a static tree.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the most likely tokens at their parent, not drawn at
    random. A node is accepted with the probability that the target gives its token. In greedy
    decoding and coupled sampling, it is accepted if and only if the target chooses the same token.
    In sampling with `children=drawn`, siblings are drawn without replacement from the head's
    distribution, and tested in that order. `accept=typical` is the paper's rule at temperatures
    above zero. It is not exact, and specbench reports it as lossy.
    Differs from the authors' code: without typical acceptance, verification and the first token of
    a step use the target's own distribution. The parameter `tree` selects a tree built as in Medusa
    or the tree of the authors' code. No draft exceeds the remaining token budget.

    One step:
    1. Head 1 reads the last committed token, and the target's hidden state that predicted this
       token.
    2. Level by level, the head ranks the children of each node. Take the children that the static
       tree contains. At each node of level k that has children, head k + 1 reads the target's
       hidden state, the last committed token and all tokens on the node's path: one call per level.
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
        """Choose the draft tree, reserve space for it, and capture the hidden states that the heads
        read.
        """
        heads = session.artifact(*self.artifacts())
        session.capture_layers(heads.captured_layers)
        width, depth = min(self.params.width, session.target.vocab_size), heads.sizes["levels"]
        self.tree = static_tree(self.params.tree, self.params.nodes, depth, width)
        session.reserve(len(self.tree.nodes))
        self.levels = HeadLevels(session, heads)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        tree = self.tree.truncate(limit, self.params.width)
        if not tree.nodes:
            return session.chain(())
        how: DrawMode = (
            "deterministic" if self.params.children == "likeliest" else "without_replacement"
        )
        # The input of a node's head is the input of its parent's head, extended by the node's own
        # token.
        return fill(tree, self.levels, self.levels.begin(), session, how=how).draft
