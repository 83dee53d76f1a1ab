"""EAGLE-2: dynamic draft trees.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-2: Faster Inference of Language Models with
Dynamic Draft Trees, EMNLP 2024, arXiv:2406.16858.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from methods.eagle.head import EagleHead
from specbench_cli.api import (
    AUTO,
    ROOT,
    Draft,
    GrowthParams,
    Levels,
    Method,
    MethodParams,
    Out,
    Session,
    Trained,
    expand,
    host,
    most,
    size_of,
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
    paper: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 6, "width": 10}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    @property
    def uses_costs(self) -> bool:
        """To choose the tree's size."""
        return self.params.nodes == AUTO

    def artifacts(self) -> tuple[Trained, ...]:
        """The head."""
        return (Trained(EagleHead, self.params.head),)

    def start(self, session: Session) -> None:
        """Make room for the tree, and have the target keep what the head reads."""
        params = self.params
        session.reserve(most(params.nodes))
        head = session.artifact(*self.artifacts())
        session.tap(head.taps)
        fed = params.width * (params.depth - 1)
        self.levels = Levels(session, head, session.new_state(head, slack=fed))

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 to 3."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # 1. True features of what was committed; the row of its last token is the root's.
        first = levels.begin(session.unread(levels.state.length()))
        # 2. and 3.
        tokens, parents, values = self._expand(session, first, depth)
        best = self._rerank(session, values, depth)
        levels.drop()
        place = {node: at for at, node in enumerate(best)} | {ROOT: ROOT}
        return session.tree(
            [tokens[node] for node in best], tuple(place[parents[node]] for node in best)
        )

    def _expand(
        self, session: Session, out: Out, depth: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Step 2: candidates level by level, each with its parent and its value, the logarithm of
        its path's probability by the head alone. That is about how often it will be accepted, so
        that the tree grows where the head is sure of itself, at no forward of the target."""
        if not host.near(session.device):  # the same there, without a wait a level
            return expand(self.levels, out, session, k=self.params.width, depth=depth)[:3]
        width = min(self.params.width, session.target.vocab_size)
        tokens, parents, values = list[int](), list[int](), list[float]()
        fed, reach = [ROOT], [0.0]  # the nodes whose children come next, and their values
        for ahead in range(depth):
            children, gains = session.ranked(out.rows, width, ahead=ahead)
            newest = range(len(tokens), len(tokens) + len(fed) * width)
            for node, value, ids, worth in zip(fed, reach, children, gains, strict=True):
                tokens += ids
                parents += [node] * width
                values += [value + gain for gain in worth]
            if ahead + 1 < depth:
                best = sorted(newest, key=values.__getitem__, reverse=True)[: self.params.width]
                above = [fed.index(parents[node]) for node in best]
                out = self.levels.feed([tokens[node] for node in best], above)
                fed, reach = best, [values[node] for node in best]
        return tokens, parents, values

    def _rerank(self, session: Session, values: Sequence[float], depth: int) -> list[int]:
        """Step 3: the best candidates of all levels. No child is worth more than its parent, and of
        equal ones the shallower comes first, so that what is chosen is connected."""
        params = self.params
        possible = [node for node, value in enumerate(values) if value > -math.inf]
        best = sorted(possible, key=values.__getitem__, reverse=True)[: most(params.nodes)]
        size = size_of(session, self.levels.model, params.nodes, width=params.width, depth=depth)
        if size is not None:
            del best[size([values[node] for node in best]) :]
        return sorted(best)
