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
    rerank,
)


class Eagle2Params(GrowthParams):
    """Parameters of `Eagle2`."""


class Eagle2(Method):
    """EAGLE-2: EAGLE's head drafts a dynamic tree, which grows where the head is confident.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the head's most likely tokens, not drawn at random. A
    node is accepted with the probability that the target gives its token. In greedy decoding and
    coupled sampling, it is accepted if and only if the target chooses the same token.
    Differs from the authors' code: `depth` counts all levels of the tree. The authors' code does
    not count the first level (`depth` 5 here is 4 there). No draft exceeds the remaining token
    budget.

    One step:
    1. The head reads the new committed tokens, each with the target's feature of the previous
       token. Drop the head's KV entries of earlier draft tokens.
    2. Expansion: on each level, the head reads the `width` nodes with the most likely paths. Each
       is read together with the feature that the head predicted for its parent. Each gets `width`
       children.
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
        """True if the method chooses the tree size from measured forward times."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and capture the features that the head reads."""
        params = self.params
        fed = params.width * (params.depth - 1)
        self.levels = Levels.of_head(
            session, *self.artifacts(), nodes=max_nodes(params.nodes), fed=fed
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # Step 1: Run the head on the features of committed tokens. The last output row ranks the
        # root's children.
        out = levels.begin(session.pending_features(levels.state.length()))
        # Step 2: The head's probability of a path approximates its acceptance rate. The tree
        # therefore grows where the head is confident, without a target forward.
        growth = Growth.create(session, params.width)
        growth.add(out)
        for _ in range(1, depth):
            growth.add(levels.feed(*growth.select_likeliest_paths()))
        levels.drop()
        # Step 3: Keep the best nodes of all levels. They form a tree because no child scores higher
        # than its parent.
        size = create_size_rule(
            session, levels.model, params.nodes, width=params.width, depth=depth
        )
        ids, parents, _ = rerank(growth.candidates(), max_nodes(params.nodes), size)
        return session.tree(ids, parents)
