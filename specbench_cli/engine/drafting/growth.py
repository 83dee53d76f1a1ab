"""Dynamic draft trees, which grow where the draft model is confident.

EAGLE-2 (Li, Wei, Zhang and Zhang, EMNLP 2024, arXiv:2406.16858). The value of a node is the log of
its path's draft probability. At each level, the draft model processes the best `k` nodes, and the
`k` likeliest children of each become candidates. In the end the best candidates form the tree. A
child has at most the value of its parent, so the selected nodes are connected.

Children are the likeliest tokens, without a draw, so the tree's draw mode is "deterministic".
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
"""Function that returns how many of the best candidates to verify. Its argument is their values,
best first."""


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A draft tree, and the nodes that the draft model processed.

    Attributes:
        draft: Nodes level by level, siblings best first.
        fed: Index of each node among the processed nodes; -1 if the model did not process it.
    """

    draft: Draft
    fed: tuple[int, ...]

    def rows(self, path: Sequence[int]) -> list[int]:
        """Return the indices of accepted nodes among the processed ones, for `Levels.keep`."""
        return [self.fed[node] for node in path]


class CandidateNodes(NamedTuple):
    """All candidates of a tree that grows, level by level. Parents come before their children.

    Attributes:
        tokens: Tokens of c candidates.
        parents: `ROOT` or the index of an earlier candidate.
        values: Log probability of each candidate's path.
        fed: Candidates that the draft model processed, in that order.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]
    fed: list[int]


class SelectedNodes(NamedTuple):
    """Selected candidates as a tree.

    ids, parents: As in `Draft`. fed: As in `GrownTree`.
    """

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
    """Return a dynamic tree after the last committed token.

    A tree of `depth` levels takes `depth` model calls, with that of `levels.begin`. (The authors'
    code counts only calls after the first expansion, so its depth is lower by one.)

    Args:
        levels: Levels of a draft model or head, after `begin`.
        first: Result of `begin`.
        k: Number of nodes processed per level, and of children per node.
        depth: Number of levels, from 1 to the `limit` argument of `propose`.
        nodes: Maximum number of nodes.
        size: Rule that selects a smaller size from the values, or None.
    """
    chosen = select(expand(levels, first, session, k=k, depth=depth), nodes, size)
    return GrownTree(session.tree(chosen.ids, chosen.parents), chosen.fed)


def expand(
    levels: Levels, first: ModelOutput, session: Session, *, k: int, depth: int
) -> CandidateNodes:
    """Process the best `k` nodes of each level except the last; see `grow`."""
    growth = Growth.create(session, k)
    growth.add(first)
    for _ in range(1, depth):
        growth.add(levels.feed(*growth.best()))
    return growth.candidates()


@renamed_members(of="create")
class Growth:
    """Growth of a dynamic tree, level by level.

    Args:
        k: Number of nodes processed per level, and of children per node.
    """

    def __init__(self, session: Session, k: int) -> None:
        self._session, self._k = session, k
        self._width = min(k, session.target.vocab_size)
        self._depth = 0  # levels of candidates so far
        self._tokens, self._parents, self._values = list[int](), list[int](), list[float]()
        self._start = 0  # index of the newest level's first candidate
        self._newest, self._fed = [ROOT], list[int]()  # nodes processed last, and all so far

    @classmethod
    def create(cls, session: Session, k: int) -> Growth:
        """Create the object for the session's device. It needs no device sync per level."""
        return cls(session, k) if host.is_on_host(session.device) else _DeviceGrowth(session, k)

    def add(self, out: ModelOutput) -> None:
        """Add the `k` likeliest children of each node processed last, initially of the root."""
        children, gains = self._session.candidate_lists(out.rows, self._width, ahead=self._depth)
        self._depth, self._start = self._depth + 1, len(self._tokens)
        for node, ids, worth in zip(self._newest, children, gains, strict=True):
            value = 0.0 if node == ROOT else self._values[node]
            self._tokens += ids
            self._parents += [node] * self._width
            self._values += [value + gain for gain in worth]

    def best(self) -> tuple[list[int] | Tensor, list[int] | Tensor]:
        """Select the `k` candidates of the newest level with the likeliest paths.

        Returns:
            Tokens and parents, as arguments of `Levels.feed`.
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
    """Growth with candidates as tensors on the device, with one sync for all levels."""

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
    """Return the best candidates as a tree.

    At equal values the shallower node comes first, so parents precede their children. Candidates
    with probability 0 are dropped.
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
    """Return the number of candidates to verify that maximizes the tokens per unit of time.

    It assumes that a node is accepted with its path probability under the draft model. A step
    commits one more token than it accepts.

    Args:
        values: Log path probabilities of the candidates, best first.
        cost: Function that returns the time of a target forward over a number of rows, including
            the root.
        fixed: Time of a step without that forward.

    Returns:
        The smallest n that maximizes (1 + sum of the first n probabilities) /
        (fixed + cost(n + 1)).
    """
    best, chosen, tokens = 1.0 / (fixed + cost(1)), 0, 1.0
    for n, value in enumerate(values, start=1):
        tokens += math.exp(value)
        rate = tokens / (fixed + cost(n + 1))
        if rate > best:
            best, chosen = rate, n
    return chosen


# ---- tree size ----------------------------------------------------------------------------------


def create_size_rule(
    session: Session, model: Metered, nodes: Nodes, *, width: int, depth: int
) -> SizeRule | None:
    """Return a rule that selects the tree size from the values, or None if the size is a number.

    The time of a step is that of drafting and of the target's forward. Drafting takes one forward
    over one row, and `depth` - 1 forwards over `width` rows. Host work is ignored.

    Args:
        model: The draft model.
    """
    if nodes != AUTO:
        return None
    drafting = session.draft_cost(model) + (depth - 1) * session.draft_cost(model, width)
    return partial(best_size, cost=session.verify_cost, fixed=drafting)
