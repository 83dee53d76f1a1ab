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
    """EAGLE-2: EAGLE's head, whose tree grows where the head is sure of itself.

    Exact because the tree is a function of the past, and in coupled decoding of the noise that the
    target shares: children are the head's likeliest tokens, each of which stands with the target's
    own probability of it, and in greedy and coupled decoding iff it is the target's own choice.
    Differs from the authors' code: the first level, which the root's forward gives, counts in
    `depth` (5 here is 4 there); nothing is drafted past the budget; in coupled decoding the head's
    scores carry the target's noise.

    One step:
    1. Feed the head the committed tokens that it has not read, each beside the target's true
       feature of the token before; what it drafted of them before is forgotten.
    2. Feed the best `width` nodes of each level, by the probability of their paths, each beside the
       feature that the head predicted for its parent; every one gets `width` children.
    3. Keep the best `nodes` of all children as the tree.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle2"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("li2024eagle2",)
    Params: ClassVar[type[MethodParams]] = Eagle2Params
    params: Eagle2Params
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = EagleHead
    paper: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 6, "width": 10}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    @property
    def uses_costs(self) -> bool:
        """To choose the tree's size."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Make room for the tree, and have the target keep what the head reads."""
        params = self.params
        fed = params.width * (params.depth - 1)
        self.levels = Levels.of_head(
            session, *self.artifacts(), nodes=max_nodes(params.nodes), fed=fed
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 to 3."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # 1. True features of what was committed; the row of its last token is the root's.
        out = levels.begin(session.unread(levels.state.length()))
        # 2. A path's probability by the head alone is about how often it will be accepted. So the
        # tree grows where the head is sure of itself, at no forward of the target.
        growth = Growth.create(session, params.width)
        growth.add(out)
        for _ in range(1, depth):
            growth.add(levels.feed(*growth.best()))
        levels.drop()
        # 3. No child is worth more than its parent, so that the best of all levels are connected.
        size = create_size_rule(
            session, levels.model, params.nodes, width=params.width, depth=depth
        )
        ids, parents, _ = select(growth.candidates(), max_nodes(params.nodes), size)
        return session.tree(ids, parents)
