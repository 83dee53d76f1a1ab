"""Trees that grow where the draft is sure of itself (dynamic draft trees).

EAGLE-2 (Li, Wei, Zhang and Zhang, EMNLP 2024, arXiv:2406.16858). The value of a node is the
probability that the draft gives to its path, held as a logarithm. Level by level the best `k` nodes
are fed and each one's `k` likeliest children become candidates; in the end the best of all
candidates are the tree. A child is worth no more than its parent, so that what is chosen is
connected.

Children are the likeliest tokens, not draws: verification takes the tree as point masses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine.levels import Levels
from specbench_cli.engine.session import Session
from specbench_cli.engine.tree import ROOT
from specbench_cli.engine.types import Draft, Out

Size = Callable[[Sequence[float]], int]
"""From the values of the best candidates, best first, to how many of them are worth a forward."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A draft tree, and what its growth leaves to know.

    Attributes:
        draft: nodes level by level, siblings best first.
        fed: each node's place in the order of feeding; -1 for those that were not fed.
    """

    draft: Draft
    fed: tuple[int, ...]

    def rows(self, path: Sequence[int]) -> list[int]:
        """Accepted nodes by their places in the order of feeding, as `Levels.keep` takes them."""
        return [self.fed[node] for node in path]


@dataclass(frozen=True, slots=True)
class Candidates:
    """All nodes that a growth has seen, level by level: a tree whose parents come first.

    Attributes:
        tokens: [c] int64.
        parents: [c] int64, `ROOT` or the index of an earlier candidate.
        values: [c], logarithm of the probability of each one's path.
        fed: [f] int64, those that were fed, in that order.
    """

    tokens: Tensor
    parents: Tensor
    values: Tensor
    fed: Tensor


def grow(
    levels: Levels,
    first: Out,
    session: Session,
    *,
    k: int,
    depth: int,
    nodes: int,
    size: Size | None = None,
) -> Grown:
    """A dynamic tree after the last committed token.

    The model is called `depth` times for a tree of `depth` levels, `levels.begin` included. (The
    authors' code counts the calls after the first expansion: its depth is less by one.)

    Args:
        levels: a draft model's or head's, after `begin`.
        first: what `begin` gave.
        k: nodes fed at a level, and children of each.
        depth: levels of the tree, from 1; at most the `limit` that `propose` was given.
        nodes: the tree's size; all candidates if they are fewer.
        size: chooses a smaller one from the values.
    """
    found = expand(levels, first, session, k=k, depth=depth)
    return select(found, nodes, size)


def expand(levels: Levels, first: Out, session: Session, *, k: int, depth: int) -> Candidates:
    """Feed the best `k` nodes of each level but the last; see `grow`."""
    width = min(k, session.target.vocab_size)
    children, gains = session.candidates(cast(Tensor, first.logits)[0, -1:], width)
    ids, value = children[0], gains[0]  # of the newest level's candidates
    tokens, values, fed = [ids], [value], []
    best = above = torch.arange(width, device=ids.device)  # which of them are fed; their parents
    seen = 0  # candidates before the newest level
    for ahead in range(1, depth):
        if ahead > 1:
            value, best = value.topk(min(k, value.shape[0]))
            above = best.div(width, rounding_mode="floor")  # by place in the level fed last
        out = levels.feed(ids.index_select(0, best), above)
        fed.append(best + seen if seen else best)
        seen += ids.shape[0]
        children, gains = session.candidates(cast(Tensor, out.logits)[0], width, ahead=ahead)
        ids, value = children.flatten(), gains.add_(value[:, None]).flatten()
        tokens.append(ids)
        values.append(value)
    order = torch.cat(fed) if fed else best[:0]
    roots = torch.full((width,), ROOT, device=order.device)
    parents = torch.cat((roots, order.repeat_interleave(width)))
    return Candidates(torch.cat(tokens), parents, torch.cat(values), order)


def select(found: Candidates, nodes: int, size: Size | None = None) -> Grown:
    """The best candidates as a tree; the one wait for the device.

    Of equal values the shallower comes first, so that a parent comes before its children. What the
    draft rules out is left out.
    """
    values, order = found.values.sort(descending=True, stable=True)
    order = order[:nodes]
    most = order.shape[0]
    above, tokens = (part.index_select(0, order) for part in (found.parents, found.tokens))
    flat = torch.cat((values[:most].double(), order, above, tokens, found.fed)).tolist()
    worth, best, parents, ids = (flat[at * most : (at + 1) * most] for at in range(4))
    fed = {node: at for at, node in enumerate(flat[4 * most :])}
    possible = [at for at in range(most) if worth[at] > -math.inf]
    if size is not None:
        possible = possible[: size([worth[at] for at in possible])]
    chosen = sorted(possible, key=best.__getitem__)
    place = {best[at]: node for node, at in enumerate(chosen)} | {ROOT: ROOT}
    drafted = torch.tensor([ids[at] for at in chosen], dtype=torch.int64, device=order.device)
    return Grown(
        Draft(drafted, tuple([place[parents[at]] for at in chosen])),
        tuple([fed.get(best[at], -1) for at in chosen]),
    )


def best_size(values: Sequence[float], cost: Callable[[int], float], fixed: float) -> int:
    """How many of the best candidates to verify: as many as give most tokens in a unit of time.

    A step commits one token and those drafted that stand; if the draft's probabilities are the
    target's, a node stands with that of its path.

    Args:
        values: logarithms of the candidates' path probabilities, best first.
        cost: time of a target forward over so many rows, the root's included.
        fixed: time of a step beside that forward.
    Returns:
        the n that makes (1 + sum of the first n probabilities) / (fixed + cost(n + 1)) greatest;
        the least of them.
    """
    best, chosen, tokens = 1.0 / (fixed + cost(1)), 0, 1.0
    for n, value in enumerate(values, start=1):
        tokens += math.exp(value)
        rate = tokens / (fixed + cost(n + 1))
        if rate > best:
            best, chosen = rate, n
    return chosen
