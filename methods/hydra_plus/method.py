"""Hydra++: Hydra's heads with a prefix attention layer.

Zachary Ankner, Rishab Parthasarathy, Aniruddha Nrusimha, Christopher Rinard, Jonathan Ragan-Kelley,
William Brandon: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 4.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from methods._heads.trees import TreeParams, static_tree
from methods.hydra_plus.head import HydraPlusHead
from specbench_cli.api import (
    AcceptParams,
    Artifact,
    Draft,
    DrawMode,
    Field,
    Levels,
    Method,
    MethodParams,
    Session,
    fill,
)


class HydraPlusParams(AcceptParams, TreeParams):
    """Parameters of `HydraPlus`."""

    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )
    nodes: int = Field(63, ge=1, description="number of nodes of the tree (authors' tree: 63)")
    depth: int = Field(
        4, ge=1, description="maximum number of levels of the tree; at most the number of heads"
    )
    width: int = Field(10, ge=1, le=10, description="maximum number of children of a node")
    children: Literal["likeliest", "drawn"] = Field(
        "likeliest",
        description="in sampling: take the most likely tokens as children (likeliest), or draw"
        " them without replacement (drawn)",
    )


class HydraPlus(Method):
    """Hydra++: Hydra's heads read the output of a layer that attends to the whole prefix.

    Lossless for the same reason as Hydra: the tree depends only on earlier tokens (in coupled
    sampling also on the Gumbel noise that all methods share), and each node is accepted with the
    probability that the target gives its token. With `children=drawn`, in sampling, siblings are
    drawn without replacement and tested in that order. `accept=typical` is the authors' rule at
    temperatures above zero, which is not exact.
    Differs from the authors' code: without typical acceptance, verification and the first token of
    a step use the target's own distribution. The parameter `tree` selects a tree built as in Medusa
    or the tree of the authors' code. No draft exceeds the remaining token budget.

    One step:
    1. Prefix attention: the layer in front of the heads reads the target's hidden states of newly
       committed tokens. The KV cache of this layer contains the earlier committed tokens, and never
       draft tokens. The heads read the layer's last output.
    2. Level by level, the head ranks the children of each node. Take the children that the static
       tree contains. Head k reads the layer's last output, the last committed token and all tokens
       on the node's path: one call per level.
    3. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "hydra++"
    aliases: ClassVar[tuple[str, ...]] = ("hydra-plus",)
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("ankner2024hydra",)
    Params: ClassVar[type[MethodParams]] = HydraPlusParams
    params: HydraPlusParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = HydraPlusHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "width"})

    def start(self, session: Session) -> None:
        """Choose the draft tree, reserve space for it, and capture the hidden states that the head
        reads.
        """
        head, params = session.artifact(*self.artifacts()), self.params
        session.capture_layers(head.captured_layers)
        width = min(params.width, session.target.vocab_size)
        depth = min(params.depth, head.levels or params.depth)
        self.tree = static_tree(params.tree, params.nodes, depth, width)
        size = len(self.tree.nodes)
        session.reserve(size)
        self.levels = Levels(session, head, session.new_state(head, slack=size))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        tree = self.tree.truncate(limit, self.params.width)
        if not tree.nodes:
            return session.chain(())
        prefix = self.levels.begin(session.pending_features(self.levels.state.length()))
        how: DrawMode = (
            "deterministic" if self.params.children == "likeliest" else "without_replacement"
        )
        grown = fill(tree, self.levels, prefix, session, how=how)
        self.levels.drop()
        return grown.draft
