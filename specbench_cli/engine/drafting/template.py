"""Draft trees of a fixed shape (templates), filled with the draft model's most likely tokens.

EAGLE (Li, Wei, Zhang and Zhang, ICML 2024, arXiv:2401.15077) and Medusa (Cai et al., ICML 2024,
arXiv:2401.10774) use such trees. A node is named by the ranks of the children on its path. For
example, (0, 2) is the third child of the root's first child. Values that depend only on the shape
are cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import groupby, product

from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.growth import GrownTree
from specbench_cli.engine.drafting.levels import HeadLevels, Levels
from specbench_cli.engine.host import Ids
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, DrawMode, ModelOutput
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.former_names import renamed_members

Ranks = tuple[int, ...]
"""Ranks of the children on the path of a node; 0 is the best."""

RATES = (0.6, 0.15, 0.07, 0.04, 0.025, 0.015, 0.01, 0.008, 0.006, 0.005)
"""Assumed acceptance rate of the child at each rank, for shapes without measurements."""


@dataclass(frozen=True, slots=True)
class TemplateLevel:
    """One level of a template, with n nodes.

    f of the n nodes have children. The draft model processes only these f nodes.

    Attributes:
        parents: Parent of each node, as an index among the nodes that the draft model processed
            last. At the first level all are 0.
        width: Number of children that each parent needs.
        picks: For each node, the index of its parent (as in `parents`) and its rank among the
            parent's children.
        fed: Indices of the f nodes that the draft model processes.
        fed_parents: Parents of these f nodes, as in `parents`.
    """

    parents: tuple[int, ...]
    width: int
    picks: tuple[tuple[int, int], ...]
    fed: tuple[int, ...]
    fed_parents: tuple[int, ...]

    def select_tokens(self, children: Tensor) -> Ids:
        """Return the tokens of this level, from the most likely children [f, width]
        of each parent."""
        if host.is_on_host(children.device):
            ids = children.tolist()
            return [ids[row][rank] for row, rank in self.picks]
        flat = tuple([row * children.shape[1] + rank for row, rank in self.picks])
        return children.flatten().index_select(0, host.cached_ids(flat, children.device))

    def select_fed(self, tokens: Ids) -> Ids:
        """Return those tokens of this level that the draft model processes."""
        if isinstance(tokens, Tensor):
            return tokens.index_select(0, host.cached_ids(self.fed, tokens.device))
        return [tokens[at] for at in self.fed]


@renamed_members(within="truncate")
@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """Fixed shape of a draft tree.

    The functions `tree_of_choices`, `tree_of_widths` and `best_tree` create templates.

    Attributes:
        nodes: Nodes level by level, siblings by rank. A node is a tuple of the ranks on its path.
        parents: Index of each node's parent in `nodes`. `ROOT` means the root.
        fed: For each node, its index among the nodes that the draft model processes. Leaves are not
            processed and have -1.
    """

    nodes: tuple[Ranks, ...]
    parents: tuple[int, ...]
    fed: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of levels."""
        return len(self.nodes[-1]) if self.nodes else 0

    def truncate(self, depth: int, width: int) -> TreeTemplate:
        """Return the nodes in the first `depth` levels, with at most `width` children per node."""
        return _truncate(self, depth, width)

    def levels(self) -> tuple[TemplateLevel, ...]:
        """Return all levels of the tree."""
        return _levels(self)


def tree_of_choices(choices: Iterable[Sequence[int]]) -> TreeTemplate:
    """Return the template with the given nodes. Each node is a sequence of ranks on its path.

    Raises:
        ValueError: The parent of a node is missing.
    """
    nodes = tuple(sorted(set(map(tuple, choices)), key=lambda node: (len(node), node)))
    place: dict[Ranks, int] = {(): ROOT} | {node: at for at, node in enumerate(nodes)}
    orphan = next((node for node in nodes if not node or node[:-1] not in place), None)
    if orphan is not None:
        raise ValueError(f"node {orphan} of a tree has no parent in it")
    inner = {node[:-1] for node in nodes}
    order = {node: at for at, node in enumerate(node for node in nodes if node in inner)}
    return TreeTemplate(
        nodes,
        tuple(place[node[:-1]] for node in nodes),
        tuple(order.get(node, -1) for node in nodes),
    )


@lru_cache
def tree_of_widths(widths: tuple[int, ...]) -> TreeTemplate:
    """Return the template in which each node of level i has `widths[i]` children."""
    ends = range(1, len(widths) + 1)
    return tree_of_choices(node for end in ends for node in product(*map(range, widths[:end])))


@lru_cache
def best_tree(
    nodes: int,
    rates: tuple[float, ...] = RATES,
    depth: int | None = None,
    width: int | None = None,
) -> TreeTemplate:
    """Return the template of n nodes with the most expected accepted tokens.

    The acceptance rate of a child is assumed to depend only on its rank among its siblings. As in
    Medusa (Cai et al.), nodes are added in the order of the product of the rates on their path.

    Args:
        rates: Acceptance rate of the child at each rank, in descending order.
        depth: Maximum number of levels.
        width: Maximum number of children of a node.
    """
    rates = rates[:width]
    heap: list[tuple[float, Ranks]] = [(-rates[0], (0,))]
    chosen: list[Ranks] = []
    while heap and len(chosen) < nodes:
        value, node = heappop(heap)
        chosen.append(node)
        if node[-1] + 1 < len(rates):
            rank = node[-1] + 1
            heappush(heap, (value / rates[rank - 1] * rates[rank], (*node[:-1], rank)))
        if depth is None or len(node) < depth:
            heappush(heap, (value * rates[0], (*node, 0)))
    return tree_of_choices(chosen)


def fill(
    template: TreeTemplate,
    levels: Levels | HeadLevels,
    first: ModelOutput,
    session: Session,
    *,
    how: DrawMode = "deterministic",
) -> GrownTree:
    """Return a draft tree with the shape of a template, after the last committed token.

    The function takes one model call per level, including the call in `levels.begin`. The template
    determines which children are used, so no level needs a device sync.

    Args:
        template: Template with at most `limit` levels, where `limit` is the argument of `propose`.
            `TreeTemplate.truncate` shortens a template.
        levels: `Levels` of a draft model or head. The caller has already called its `begin`.
        first: The output that `begin` returned.
        how: How children are chosen if the decoding rule draws tokens: "independent",
            "without_replacement" or "deterministic".
    """
    out = first
    tokens: list[Ids] = []
    distributions: list[Tensor] = []
    for ahead, level in enumerate(template.levels()):
        children, q = session.branch(out.rows, level.width, how=how, ahead=ahead)
        tokens.append(level.select_tokens(children))
        if q is not None:
            distributions.append(q.index_select(0, host.ids(level.parents, q.device)))
        if level.fed:
            out = levels.feed(level.select_fed(tokens[-1]), level.fed_parents)
    return GrownTree(
        session.tree(host.concatenate(tokens), template.parents, distributions, how), template.fed
    )


def fill_from(template: TreeTemplate, logits: Tensor, session: Session) -> Draft:
    """Return a draft tree with the shape of a template, from the logits of all levels, as in
    Medusa.

    All nodes of a level have the same children: the tokens with the best logits for that level.
    Some nodes are dropped: nodes of levels without logits or beyond the remaining token budget, and
    tokens with logits of -inf. The function takes one device sync.

    Args:
        logits: Logits [levels, V] over the target's token ids.
    """
    tree = template.truncate(min(len(logits), session.max_draft_length()), logits.shape[-1])
    if not tree.nodes:
        return session.chain(())
    width = 1 + max(max(node) for node in tree.nodes)
    best, worth = session.candidate_lists(logits[: tree.depth], width, ahead=range(tree.depth))
    if any(row[-1] == -math.inf for row in worth):
        possible = [
            node
            for node in tree.nodes
            if all(worth[level][rank] > -math.inf for level, rank in enumerate(node))
        ]
        tree = tree_of_choices(possible)
    return session.tree([best[len(node) - 1][node[-1]] for node in tree.nodes], tree.parents)


@lru_cache
def _truncate(template: TreeTemplate, depth: int, width: int) -> TreeTemplate:
    kept = [node for node in template.nodes if len(node) <= depth and max(node) < width]
    return tree_of_choices(kept)


@lru_cache
def _levels(template: TreeTemplate) -> tuple[TemplateLevel, ...]:
    found = []
    last: list[Ranks] = [()]  # nodes processed last
    inner = {node[:-1] for node in template.nodes}
    for _, group in groupby(template.nodes, key=len):
        nodes = list(group)
        rows = [last.index(node[:-1]) for node in nodes]
        width = 1 + max(node[-1] for node in nodes)
        fed = [at for at, node in enumerate(nodes) if node in inner]
        last = [nodes[at] for at in fed]
        found.append(
            TemplateLevel(
                parents=tuple(rows),
                width=width,
                picks=tuple((row, node[-1]) for row, node in zip(rows, nodes, strict=True)),
                fed=tuple(fed),
                fed_parents=tuple(rows[at] for at in fed),
            )
        )
    return tuple(found)
