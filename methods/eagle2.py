"""EAGLE-2: dynamic draft trees.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-2: Faster Inference of Language Models with
Dynamic Draft Trees, EMNLP 2024, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods.eagle.head import EagleHead
from specbench_cli.api import (
    AUTO,
    Artifact,
    Draft,
    Growth,
    GrowthParams,
    Levels,
    Method,
    MethodParams,
    Session,
    create_size_rule,
    max_nodes,
    select,
)


class Eagle2Params(GrowthParams):
    """Parameters of `Eagle2`."""


class Eagle2(Method):
    """EAGLE-2: EAGLE's head drafts a dynamic tree, which grows where the head is confident.

    Exact because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise of each position). Nodes are the head's most likely tokens, not drawn at random. Each is
    accepted with the target's probability of it; in greedy decoding and coupled sampling it is
    accepted if and only if the target chooses it.
    Differs from the authors' code: `depth` includes the first level, which comes from the root's
    forward (5 here is 4 there). No draft exceeds the remaining token budget.

    One step:
    1. Feed the head the new committed tokens, each with the target's feature of the previous token.
       Drop what the head computed for drafted tokens.
    2. Expansion: on each level, feed the `width` nodes with the most likely paths, each with the
       feature that the head predicted for its parent. Each gets `width` children.
    3. Reranking: keep the best `nodes` of all children as the tree.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle2"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("li2024eagle2",)
    Params: ClassVar[type[MethodParams]] = Eagle2Params
    params: Eagle2Params
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = EagleHead
    paper_params: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 6, "width": 10}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    @property
    def uses_costs(self) -> bool:
        """True if the size of the tree is chosen from measured times of forwards."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Reserve space for the tree, and capture the features that the head reads."""
        params = self.params
        fed = params.width * (params.depth - 1)
        self.levels = Levels.of_head(
            session, *self.artifacts(), nodes=max_nodes(params.nodes), fed=fed
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step (steps 1 to 3 in the docstring of the class)."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # Step 1: True features of committed tokens. The output at the last one gives the root's
        # children.
        out = levels.begin(session.pending_features(levels.state.length()))
        # Step 2: The head's probability of a path approximates its acceptance rate. The tree
        # therefore grows where the head is confident, without a target forward.
        growth = Growth.create(session, params.width)
        growth.add(out)
        for _ in range(1, depth):
            growth.add(levels.feed(*growth.best()))
        levels.drop()
        # Step 3: No child scores higher than its parent, so the best nodes of all levels form a
        # tree.
        size = create_size_rule(
            session, levels.model, params.nodes, width=params.width, depth=depth
        )
        ids, parents, _ = select(growth.candidates(), max_nodes(params.nodes), size)
        return session.tree(ids, parents)
