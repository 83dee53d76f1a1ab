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
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.growth_params import Nodes
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.params import AUTO
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Out
from specbench_cli.engine.verify.tree import ROOT

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


class Candidates(NamedTuple):
    """All nodes that a growth has seen, level by level: a tree whose parents come first.

    Attributes:
        tokens: of c candidates.
        parents: `ROOT` or the index of an earlier candidate.
        values: logarithm of the probability of each one's path.
        fed: those that were fed, in that order.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]
    fed: list[int]


class Chosen(NamedTuple):
    """A tree of candidates: ids and parents as in `Draft`, fed as in `Grown`."""

    ids: list[int]
    parents: tuple[int, ...]
    fed: tuple[int, ...]


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
    chosen = select(expand(levels, first, session, k=k, depth=depth), nodes, size)
    return Grown(session.tree(chosen.ids, chosen.parents), chosen.fed)


def expand(levels: Levels, first: Out, session: Session, *, k: int, depth: int) -> Candidates:
    """Feed the best `k` nodes of each level but the last; see `grow`.

    On a device that the host waits for, levels are chosen there, and one wait brings them all.
    """
    if not host.near(session.device):
        return _expand_there(levels, first, session, k=k, depth=depth)
    width = min(k, session.target.vocab_size)
    children, gains = session.ranked(cast(Tensor, first.logits)[0, -1:], width)
    tokens, values = children[0], gains[0]
    parents, fed = [ROOT] * width, list[int]()
    start = 0  # of the newest level's candidates
    # Which of them are fed, and their parents as `feed` asks for them.
    best, above = [*range(width)], [0] * width
    for ahead in range(1, depth):
        if ahead > 1:
            newest = values[start:]
            best = sorted(range(len(newest)), key=newest.__getitem__, reverse=True)[:k]
            above = [at // width for at in best]
        nodes = [start + at for at in best]
        out = levels.feed([tokens[node] for node in nodes], above)
        start = len(tokens)
        children, gains = session.ranked(cast(Tensor, out.logits)[0], width, ahead=ahead)
        for node, ids, worth in zip(nodes, children, gains, strict=True):
            value = values[node]
            tokens += ids
            parents += [node] * width
            values += [value + gain for gain in worth]
        fed += nodes
    return Candidates(tokens, parents, values, fed)


def _expand_there(
    levels: Levels, first: Out, session: Session, *, k: int, depth: int
) -> Candidates:
    """As `expand`, candidate for candidate, with one wait."""
    width = min(k, session.target.vocab_size)
    children, gains = session.candidates(cast(Tensor, first.logits)[0, -1:], width)
    tokens, values = children.flatten(), gains.double().flatten()  # of the newest level
    found = [(tokens, torch.full_like(tokens, ROOT), values)]
    fed = [tokens[:0]]
    best, start = torch.arange(width, device=tokens.device), 0
    for ahead in range(1, depth):
        if ahead == 1:
            out = levels.feed(tokens, [0] * width)
        else:
            best = values.sort(descending=True, stable=True).indices[:k]
            out = levels.feed(tokens[best], best // width)
        fed.append(start + best)
        start += len(tokens)
        children, gains = session.candidates(cast(Tensor, out.logits)[0], width, ahead=ahead)
        tokens, values = children.flatten(), (values[best, None] + gains).flatten()
        found.append((tokens, fed[-1].repeat_interleave(width), values))
    parts = [torch.cat(list(part)) for part in (*zip(*found, strict=True), fed)]
    return Candidates(*host.lists(*parts))


def select(found: Candidates, nodes: int, size: Size | None = None) -> Chosen:
    """The best candidates as a tree.

    Of equal values the shallower comes first, so that a parent comes before its children. What the
    draft rules out is left out.
    """
    values = found.values
    possible = [at for at, value in enumerate(values) if value > -math.inf]
    best = sorted(possible, key=values.__getitem__, reverse=True)[:nodes]
    if size is not None:
        del best[size([values[at] for at in best]) :]
    best.sort()
    place = {at: node for node, at in enumerate(best)} | {ROOT: ROOT}
    fed = {at: row for row, at in enumerate(found.fed)}
    return Chosen(
        [found.tokens[at] for at in best],
        tuple([place[found.parents[at]] for at in best]),
        tuple([fed.get(at, -1) for at in best]),
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


# ---- its size -----------------------------------------------------------------------------------


def size_of(
    session: Session, model: Metered, nodes: Nodes, *, width: int, depth: int
) -> Size | None:
    """What chooses a tree's size from its candidates' values; None where the size is a number.

    The time of a step is that of drafting, a forward over one row and `depth` - 1 over `width`,
    and of the target's forward; what the host does between them counts for nothing.

    Args:
        model: what drafts.
    """
    if nodes != AUTO:
        return None
    drafting = session.draft_cost(model) + (depth - 1) * session.draft_cost(model, width)
    return partial(best_size, cost=session.verify_cost, fixed=drafting)
