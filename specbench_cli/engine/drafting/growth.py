"""Dynamic draft trees, which grow where the draft model is confident.

EAGLE-2 (Li, Wei, Zhang and Zhang, EMNLP 2024, arXiv:2406.16858) proposed them. The value of a node
is the log of the draft probability of its path. At each level, the draft model processes the `k`
nodes with the highest values. The `k` most likely children of each processed node become
candidates. In the end the candidates with the highest values form the tree. A child never has a
higher value than its parent, so the selected nodes are connected.

Children are the most likely tokens and not random draws, so the tree's draw mode is
"deterministic".
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
        draft: The tree. Nodes are listed level by level, and siblings by descending probability.
        fed: For each node, its index among the nodes that the draft model processed. -1 if the
            draft model did not process the node.
    """

    draft: Draft
    fed: tuple[int, ...]

    def rows(self, path: Sequence[int]) -> list[int]:
        """Return the indices of accepted nodes among the processed nodes, for `Levels.keep`."""
        return [self.fed[node] for node in path]


class CandidateNodes(NamedTuple):
    """All candidate nodes of a growing tree, level by level. Parents come before their children.

    Attributes:
        tokens: Token of each of the c candidates.
        parents: Parent of each candidate: `ROOT` or the index of an earlier candidate.
        values: Log probability of each candidate's path.
        fed: Indices of the candidates that the draft model processed, in the order of processing.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]
    fed: list[int]


class SelectedNodes(NamedTuple):
    """The selected candidates, as a tree.

    ids: Token of each node.
    parents: Index of each node's parent among the nodes. `ROOT` means the root.
    fed: For each node, its index among the nodes that the draft model processed. -1 if the draft
        model did not process the node.
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
    """Return a dynamic tree that follows the last committed token.

    A tree of `depth` levels takes `depth` model calls, including the call in `levels.begin`. (The
    EAGLE authors' code counts only the calls after the first expansion, so its depth is lower by
    one.)

    Args:
        levels: `Levels` of a draft model or head. The caller has already called its `begin`.
        first: The output that `begin` returned.
        k: Number of nodes that the model processes per level, and number of children per node.
        depth: Number of levels, from 1 to the `limit` argument of `propose`.
        nodes: Maximum number of nodes in the tree.
        size: Rule that selects a tree size below `nodes` from the values of the nodes, or None.
    """
    chosen = rerank(expand(levels, first, session, k=k, depth=depth), nodes, size)
    return GrownTree(session.tree(chosen.ids, chosen.parents), chosen.fed)


def expand(
    levels: Levels, first: ModelOutput, session: Session, *, k: int, depth: int
) -> CandidateNodes:
    """Let the model process the best `k` nodes of each level except the last. Their children grow
    the tree.
    """
    growth = Growth.create(session, k)
    growth.add(first)
    for _ in range(1, depth):
        growth.add(levels.feed(*growth.select_likeliest_paths()))
    return growth.candidates()


@renamed_members(of="create", best="select_likeliest_paths")
class Growth:
    """Growth of a dynamic tree, level by level.

    Args:
        k: Number of nodes that the model processes per level, and number of children per node.
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
        """Create the subclass for the session's device. On a GPU, a level needs no device sync."""
        return cls(session, k) if host.is_on_host(session.device) else _DeviceGrowth(session, k)

    def add(self, out: ModelOutput) -> None:
        """Add the `k` most likely children of each node that the model processed last.

        At the first level, that node is the root.
        """
        children, gains = self._session.candidate_lists(out.rows, self._width, ahead=self._depth)
        self._depth, self._start = self._depth + 1, len(self._tokens)
        for node, ids, worth in zip(self._newest, children, gains, strict=True):
            value = 0.0 if node == ROOT else self._values[node]
            self._tokens += ids
            self._parents += [node] * self._width
            self._values += [value + gain for gain in worth]

    def select_likeliest_paths(self) -> tuple[list[int] | Tensor, list[int] | Tensor]:
        """Select the `k` nodes of the newest level whose paths have the highest probability.

        Returns:
            Tokens and parents of the nodes, as arguments of `Levels.feed`.
        """
        newest = self._values[self._start :]
        best = sorted(range(len(newest)), key=newest.__getitem__, reverse=True)[: self._k]
        self._newest = [self._start + at for at in best]
        self._fed += self._newest
        return [self._tokens[node] for node in self._newest], [at // self._width for at in best]

    def candidates(self) -> CandidateNodes:
        """Return all candidate nodes so far."""
        return CandidateNodes(self._tokens, self._parents, self._values, self._fed)


class _DeviceGrowth(Growth):
    """Growth of a tree that keeps its candidates on the device, with one sync for all levels."""

    def __init__(self, session: Session, k: int) -> None:
        super().__init__(session, k)
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and values
        self._chosen: list[Tensor] = []  # indices of the fed candidates, level by level

    def add(self, out: ModelOutput) -> None:
        """Add the most likely children of each node that the model processed last."""
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

    def select_likeliest_paths(self) -> tuple[list[int] | Tensor, list[int] | Tensor]:
        """Select the nodes of the newest level whose paths have the highest probability."""
        tokens, _, values = self._levels[-1]
        if self._depth == 1:  # sorted already, and children of the root
            self._best = torch.arange(self._width, device=tokens.device)
            self._chosen.append(self._best)
            return tokens, [0] * self._width
        self._best = values.sort(descending=True, stable=True).indices[: self._k]
        self._chosen.append(self._start + self._best)
        return tokens[self._best], self._best // self._width

    def candidates(self) -> CandidateNodes:
        """Return all candidate nodes so far."""
        parts = [torch.cat(part) for part in zip(*self._levels, strict=True)]
        fed = torch.cat([self._levels[0][0][:0], *self._chosen])
        return CandidateNodes(*host.lists(*parts, fed))


def rerank(candidates: CandidateNodes, nodes: int, size: SizeRule | None = None) -> SelectedNodes:
    """Return the candidates with the highest values as a tree.

    If values are equal, the node nearer to the root comes first, so parents precede their children.
    Candidates with probability 0 are dropped.
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
    """Return how many candidates to verify, so that the tokens per unit of time are maximal.

    The function assumes that the target accepts a node with the node's path probability under the
    draft model. A step commits one more token than the target accepts.

    Args:
        values: Log path probabilities of the candidates, in descending order.
        cost: Function that returns the time of a target forward from its number of rows. The root
            is one of the rows.
        fixed: Time of a step without the target forward.

    Returns:
        The smallest n that maximizes (1 + sum of the first n probabilities) / (fixed + cost(n +
        1)).
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
    """Return a rule that selects the tree size from the values of the nodes.

    Return None if the parameter is a fixed size. The rule estimates the time of a step from
    drafting and the target forward. Drafting takes one forward over one row, and `depth` - 1
    forwards over `width` rows. CPU work between forwards is ignored.

    Args:
        model: The draft model.
    """
    if nodes != AUTO:
        return None
    drafting = session.draft_cost(model) + (depth - 1) * session.draft_cost(model, width)
    return partial(best_size, cost=session.verify_cost, fixed=drafting)
