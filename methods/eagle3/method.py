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
    select,
)


class Eagle3Params(GrowthParams):
    """Parameters of `Eagle3`."""


class Eagle3(Method):
    """EAGLE-3: a head on three target layers, trained on its own drafts, drafts a dynamic tree.

    Exact because the tree depends only on earlier tokens (in coupled sampling also on the Gumbel
    noise of each position). Nodes are the head's most likely tokens, not drawn at random. Each is
    accepted with the target's probability of it; in greedy decoding and coupled sampling it is
    accepted if and only if the target chooses it. Tokens outside the head's draft vocabulary are
    never drafted.
    Differs from the authors' code: `depth` includes the first level, which comes from the root's
    forward (5 here is 4 there). No draft exceeds the remaining token budget.

    One step:
    1. Feed the head the new committed tokens, each with the target's features of the previous token
       from a low, a middle and a high layer. Drop what the head computed for drafted tokens.
    2. Expansion: on each level, feed the `width` nodes with the most likely paths, each with the
       head's own hidden state at its parent. Each gets `width` children.
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
        """True if the size of the tree is chosen from measured times of forwards."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Reserve space for the tree, and capture the hidden states that the head reads."""
        params = self.params
        fed = params.width * (params.depth - 1)
        # The head reads a low, a middle and a high layer, unlike EAGLE, which reads the features
        # before the output matrix.
        self.levels = Levels.of_head(
            session, *self.artifacts(), nodes=max_nodes(params.nodes), fed=fed
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step (steps 1 to 3 in the docstring of the class)."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # Step 1: The head joins the hidden states of three layers into one feature g.
        first = levels.begin(session.pending_features(levels.state.length()))
        # Step 2: Grow as EAGLE-2 does. Drafted nodes have no g, so the head reads its own hidden
        # state at the parent. It was not trained to predict g there, but to draft well over several
        # levels from its own output (training-time test).
        found = expand(levels, first, session, k=params.width, depth=depth)
        levels.drop()
        # Step 3: The best of all levels. Tokens outside the draft vocabulary have log-probability
        # -inf and are left out.
        size = create_size_rule(
            session, levels.model, params.nodes, width=params.width, depth=depth
        )
        ids, parents, _ = select(found, max_nodes(params.nodes), size)
        return session.tree(ids, parents)
