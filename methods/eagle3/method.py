"""EAGLE-3: a draft head on hidden states of three target layers.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-3: Scaling up Inference Acceleration of
Large Language Models via Training-Time Test, NeurIPS 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods.eagle3.head import Eagle3Head
from specbench_cli.api import (
    AUTO,
    Artifact,
    Draft,
    GrowthParams,
    Levels,
    Method,
    MethodParams,
    Session,
    create_size_rule,
    expand,
    max_nodes,
    rerank,
)


class Eagle3Params(GrowthParams):
    """Parameters of `Eagle3`."""


class Eagle3(Method):
    """EAGLE-3: a head on three target layers, trained on its own drafts, drafts a dynamic tree.

    Lossless because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise that all methods share). Nodes are the head's most likely tokens, not drawn at random. A
    node is accepted with the probability that the target gives its token. In greedy decoding and
    coupled sampling, it is accepted if and only if the target chooses the same token. Tokens
    outside the head's draft vocabulary are never drafted.
    Differs from the authors' code: `depth` counts all levels of the tree. The authors' code does
    not count the first level (`depth` 5 here is 4 there). No draft exceeds the remaining token
    budget.

    One step:
    1. The head reads the new committed tokens, each with the target's features of the previous
       token from a low, a middle and a high layer. Drop the head's KV entries of earlier draft
       tokens.
    2. Expansion: on each level, the head reads the `width` nodes with the most likely paths. Each
       is read together with the head's own hidden state at its parent. Each gets `width` children.
    3. Reranking: keep the best `nodes` of all children as the tree.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle3"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("li2025eagle3",)
    Params: ClassVar[type[MethodParams]] = Eagle3Params
    params: Eagle3Params
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = Eagle3Head
    paper_params: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 8, "width": 10}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    @property
    def uses_costs(self) -> bool:
        """True if the method chooses the tree size from measured forward times."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and capture the hidden states that the head reads."""
        params = self.params
        fed = params.width * (params.depth - 1)
        # EAGLE-3's head reads a low, a middle and a high layer. EAGLE's head reads only the last
        # hidden state.
        self.levels = Levels.of_head(
            session, *self.artifacts(), nodes=max_nodes(params.nodes), fed=fed
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 to 3 of the class docstring."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # Step 1: The head projects the hidden states of three target layers to one feature.
        first = levels.begin(session.pending_features(levels.state.length()))
        # Step 2: Grow the tree as EAGLE-2 does. The target has no hidden states for draft tokens,
        # so the head reads its own hidden state at the parent. Training prepares the head for this
        # (training-time test).
        found = expand(levels, first, session, k=params.width, depth=depth)
        levels.drop()
        # Step 3: Keep the best nodes of all levels. Tokens outside the draft vocabulary have
        # log-probability -inf and are never selected.
        size = create_size_rule(
            session, levels.model, params.nodes, width=params.width, depth=depth
        )
        ids, parents, _ = rerank(found, max_nodes(params.nodes), size)
        return session.tree(ids, parents)
