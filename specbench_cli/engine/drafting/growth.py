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
from typing import NamedTuple

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.growth_params import Nodes
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.params import AUTO
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, ModelOutput
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.former_names import renamed_members

SizeRule = Callable[[Sequence[float]], int]
"""From the values of the best candidates, best first, to how many of them are worth a forward."""


@dataclass(frozen=True, slots=True)
class GrownTree:
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


class CandidateNodes(NamedTuple):
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


class SelectedNodes(NamedTuple):
    """A tree of candidates: ids and parents as in `Draft`, fed as in `GrownTree`."""

    ids: list[int]
    parents: tuple[int, ...]
    fed: tuple[int, ...]


def grow(
    levels: Levels,
    first: ModelOutput,
    session: Session,
    *,
    k: int,
    depth: int,
    nodes: int,
    size: SizeRule | None = None,
) -> GrownTree:
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
    return GrownTree(session.tree(chosen.ids, chosen.parents), chosen.fed)


def expand(
    levels: Levels, first: ModelOutput, session: Session, *, k: int, depth: int
) -> CandidateNodes:
    """Feed the best `k` nodes of each level but the last; see `grow`."""
    growth = Growth.create(session, k)
    growth.add(first)
    for _ in range(1, depth):
        growth.add(levels.feed(*growth.best()))
    return growth.candidates()


@renamed_members(of="create")
class Growth:
    """Candidates of a dynamic tree while it grows, level by level.

    On the host they are lists.

    Args:
        k: nodes fed at a level, and children of each.
    """

    def __init__(self, session: Session, k: int) -> None:
        self._session, self._k = session, k
        self._width = min(k, session.target.vocab_size)
        self._depth = 0  # levels of candidates so far
        self._tokens, self._parents, self._values = list[int](), list[int](), list[float]()
        self._start = 0  # index of the newest level's first candidate
        self._newest, self._fed = [ROOT], list[int]()  # nodes fed last, and all that were fed

    @classmethod
    def create(cls, session: Session, k: int) -> Growth:
        """Return a growth that does not wait for the session's device at each level."""
        return cls(session, k) if host.is_on_host(session.device) else _DeviceGrowth(session, k)

    def add(self, out: ModelOutput) -> None:
        """Add the `k` likeliest children of each node that was fed last, at first of the root."""
        children, gains = self._session.candidate_lists(out.rows, self._width, ahead=self._depth)
        self._depth, self._start = self._depth + 1, len(self._tokens)
        for node, ids, worth in zip(self._newest, children, gains, strict=True):
            value = 0.0 if node == ROOT else self._values[node]
            self._tokens += ids
            self._parents += [node] * self._width
            self._values += [value + gain for gain in worth]

    def best(self) -> tuple[list[int] | Tensor, list[int] | Tensor]:
        """Choose the `k` newest candidates whose paths are likeliest, to feed them.

        Returns:
            tokens and parents as `Levels.feed` takes them.
        """
        newest = self._values[self._start :]
        best = sorted(range(len(newest)), key=newest.__getitem__, reverse=True)[: self._k]
        self._newest = [self._start + at for at in best]
        self._fed += self._newest
        return [self._tokens[node] for node in self._newest], [at // self._width for at in best]

    def candidates(self) -> CandidateNodes:
        """Return all candidates."""
        return CandidateNodes(self._tokens, self._parents, self._values, self._fed)


class _DeviceGrowth(Growth):
    """The same candidates as tensors on the device. One wait brings all levels."""

    def __init__(self, session: Session, k: int) -> None:
        super().__init__(session, k)
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and values
        self._chosen: list[Tensor] = []  # indices of the fed candidates, level by level

    def add(self, out: ModelOutput) -> None:
        """See `Growth`."""
        children, gains = self._session.candidates(out.rows, self._width, ahead=self._depth)
        tokens, values = children.flatten(), gains.double().flatten()
        if self._depth:
            parents = self._chosen[-1].repeat_interleave(self._width)
            values = (self._levels[-1][2][self._best, None] + gains).flatten()
            self._start += len(self._levels[-1][0])
        else:
            parents = torch.full_like(tokens, ROOT)
        self._levels.append((tokens, parents, values))
        self._depth += 1

    def best(self) -> tuple[list[int] | Tensor, list[int] | Tensor]:
        """See `Growth`."""
        tokens, _, values = self._levels[-1]
        if self._depth == 1:  # sorted already, and children of the root
            self._best = torch.arange(self._width, device=tokens.device)
            self._chosen.append(self._best)
            return tokens, [0] * self._width
        self._best = values.sort(descending=True, stable=True).indices[: self._k]
        self._chosen.append(self._start + self._best)
        return tokens[self._best], self._best // self._width

    def candidates(self) -> CandidateNodes:
        """See `Growth`."""
        parts = [torch.cat(part) for part in zip(*self._levels, strict=True)]
        fed = torch.cat([self._levels[0][0][:0], *self._chosen])
        return CandidateNodes(*host.lists(*parts, fed))


def select(candidates: CandidateNodes, nodes: int, size: SizeRule | None = None) -> SelectedNodes:
    """The best candidates as a tree.

    Of equal values the shallower comes first, so that a parent comes before its children. What the
    draft rules out is left out.
    """
    values = candidates.values
    possible = [at for at, value in enumerate(values) if value > -math.inf]
    best = sorted(possible, key=values.__getitem__, reverse=True)[:nodes]
    if size is not None:
        del best[size([values[at] for at in best]) :]
    best.sort()
    place = {at: node for node, at in enumerate(best)} | {ROOT: ROOT}
    fed = {at: row for row, at in enumerate(candidates.fed)}
    return SelectedNodes(
        [candidates.tokens[at] for at in best],
        tuple([place[candidates.parents[at]] for at in best]),
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


def create_size_rule(
    session: Session, model: Metered, nodes: Nodes, *, width: int, depth: int
) -> SizeRule | None:
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
