"""DySpec: draft trees that grow where the draft model is likely to be accepted.

Yunfan Xiong, Ruoyu Zhang, Yanzeng Li, Tianhao Wu, Lei Zou: DySpec: Faster Speculative Decoding with
Dynamic Token Tree Structure, 2024, arXiv:2410.11744.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any, ClassVar, Literal

from torch import Tensor

from specbench_cli.api import (
    ROOT,
    Draft,
    Field,
    Levels,
    Method,
    MethodParams,
    Outcome,
    Session,
    host,
    siblings,
)


class DySpecParams(MethodParams):
    """Parameters of `DySpec`."""

    nodes: int = Field(16, ge=1, description="maximum number of nodes of the tree")
    depth: int = Field(8, ge=1, description="maximum number of levels of the tree")
    growth: Literal["heap", "threshold"] = Field(
        "heap",
        description="order in which slots are filled: the most valuable first (heap), or level"
        " by level (threshold)",
    )
    threshold: float = Field(
        0.06, gt=0, le=1, description="growth=threshold: minimum value of a slot"
    )


class ChildSampler:
    """Sampler of the children of one node of the draft tree.

    Args:
        session: Session of the request.
        distribution: In sampling, the draft model's distribution [vocab], from which children are
            drawn without replacement. Otherwise, the most likely tokens as (ids,
            log-probabilities), which become the children in this order.
    """

    def __init__(self, session: Session, distribution: Any) -> None:
        self.random, self.distribution, self.drawn = session.random, distribution, list[int]()

    def fill(self) -> tuple[int, float]:
        """Return the next child y and its probability R(y).

        R is the draft model's distribution without the earlier children, renormalised.
        """
        if isinstance(self.distribution, Tensor):
            left = siblings.remaining_distribution(self.distribution, self.drawn)
            y = self.random.categorical(left)
            token, chance = host.to_numbers(y, left.gather(0, y[None]))
        else:
            (ids, logs), at = self.distribution, len(self.drawn)
            token, p, before = ids[at], math.exp(logs[at]), 1 - sum(map(math.exp, logs[:at]))
            last = p >= before or max(logs[at + 1 :], default=-math.inf) == -math.inf
            chance = 1.0 if last else p / before
        self.drawn.append(token)
        return token, chance


class DySpec(Method):
    """DySpec: draws a tree that grows where acceptance is most likely.

    A slot is a free place for the next child of a node. Its value v is the estimated probability
    that verification reaches it. A child y is drawn from R, the draft model's distribution without
    the earlier siblings. It opens two slots: one for its own first child, with value v R(y), and
    one for the next sibling, with value v (1 - R(y)).
    Lossless because the method decides to fill a slot before the token of the slot is drawn. The
    children of a node are therefore the first draws without replacement from the draft model's
    distribution, and recursive rejection tests them in that order. In greedy decoding and coupled
    sampling (all methods share the Gumbel noise) they are the draft model's most likely tokens.
    Differs from the paper: a node is fed to the draft model when its first slot is filled.

    One step. It starts with the root's first slot, which has value 1. Steps 1 and 2 repeat until
    the tree has enough nodes:
    1. Take the slot with the highest value. If the draft model has not processed the node yet, feed
       the node. With `growth=threshold`, take slots level by level.
    2. Draw a child y for the slot, and add the two slots of y. With `growth=threshold`, add only
       slots with a value of at least `threshold`.
    3. (engine) One target forward over the root and all nodes; recursive rejection; commit.
    """

    name: ClassVar[str] = "dyspec"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("xiong2024dyspec",)
    Params: ClassVar[type[MethodParams]] = DySpecParams
    params: DySpecParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and prefill the draft model."""
        self.levels = Levels.of_draft(session, nodes=self.params.nodes)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        params, depth = self.params, min(self.params.depth, limit)
        n, by_level = params.nodes, params.growth == "threshold"
        least, best = by_level * params.threshold, min(n, session.target.vocab_size)
        tokens, parents, depths = list[int](), list[int](), {ROOT: 0}
        children, self.place = (
            dict[int, ChildSampler](),
            dict[int, int](),
        )  # `place`: number of nodes fed before
        slots = [((0.0, 0), ROOT, 1.0)] if depth else []  # heap of (order, node, value)
        while slots and len(tokens) < n:
            _, node, v = heappop(slots)
            if node not in children:
                new = [node, *(at for _, at, _ in slots if by_level)]
                if above := [self.place[parents[at]] for at in new if at != ROOT]:
                    out = self.levels.extend([tokens[at] for at in new], above)
                else:
                    out = self.levels.begin(session.pending_tokens(self.levels.state.length()))
                self.place |= {at: len(self.place) - 1 + turn for turn, at in enumerate(new)}
                if session.sampling.draws:
                    own: Any = session.warp(out.rows)
                else:
                    own = zip(
                        *session.candidate_lists(out.rows, best, ahead=depths[node]), strict=True
                    )
                children |= {
                    at: ChildSampler(session, distribution)
                    for at, distribution in zip(new, own, strict=True)
                }
            y, chance = children[node].fill()
            child, tokens, parents = len(tokens), [*tokens, y], [*parents, node]
            depths[child] = depths[node] + 1
            for at, left in ((node, v * (1.0 - chance)), (child, v * chance)):
                if left > 0.0 and left >= least and depths[at] < depth:
                    heappush(slots, ((depths[at], at) if by_level else (-left, child), at, left))
        distributions = [
            children[parent].distribution for parent in parents if session.sampling.draws
        ]
        return session.tree(tokens, tuple(parents), distributions)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Keep the draft model's KV entries of accepted nodes.

        The last accepted node may have none.
        """
        self.levels.keep(self.place[node] for node in outcome.path if node in self.place)
