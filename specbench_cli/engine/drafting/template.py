"""Trees of a fixed shape, filled with a draft's best tokens or draws by their rank.

EAGLE (Li, Wei, Zhang and Zhang, ICML 2024, arXiv:2401.15077) and Medusa (Cai et al., ICML 2024,
arXiv:2401.10774) draft such trees. A node is named by the ranks of the children on its path: (0, 2)
is the third child of the first child of the root. All that depends on the shape alone is worked
out once.
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
"""A node by the ranks of the children on its path, 0 the best."""

RATES = (0.6, 0.15, 0.07, 0.04, 0.025, 0.015, 0.01, 0.008, 0.006, 0.005)
"""How often the child of each rank is the right one: an assumption, for shapes not measured."""


@dataclass(frozen=True, slots=True)
class TemplateLevel:
    """One level of a template of n nodes, f of which have children and so are fed.

    Attributes:
        rows: each node's parent by its place in what was fed last; 0 for the first.
        width: children that a parent must have.
        picks: each node by its parent, as in `rows`, and its rank.
        fed: the places of the f to feed; above: their parents as in `rows`.
    """

    parents: tuple[int, ...]
    width: int
    picks: tuple[tuple[int, int], ...]
    fed: tuple[int, ...]
    fed_parents: tuple[int, ...]

    def select_tokens(self, children: Tensor) -> Ids:
        """The level's tokens, of its parents' children [f, width]."""
        if host.is_on_host(children.device):
            said = children.tolist()
            return [said[row][rank] for row, rank in self.picks]
        flat = tuple([row * children.shape[1] + rank for row, rank in self.picks])
        return children.flatten().index_select(0, host.cached_ids(flat, children.device))

    def select_fed(self, tokens: Ids) -> Ids:
        """Of the level's tokens those to feed."""
        if isinstance(tokens, Tensor):
            return tokens.index_select(0, host.cached_ids(self.fed, tokens.device))
        return [tokens[at] for at in self.fed]


@renamed_members(within="truncate")
@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """The shape of a tree; made by `tree_of_choices`, `tree_of_widths` or `best_tree`.

    Attributes:
        nodes: level by level, siblings one after another by rank.
        parents: as in `Draft`.
        fed: each node's place in the order of feeding; -1 for leaves, which are not fed.
    """

    nodes: tuple[Ranks, ...]
    parents: tuple[int, ...]
    fed: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of levels."""
        return len(self.nodes[-1]) if self.nodes else 0

    def truncate(self, depth: int, width: int) -> TreeTemplate:
        """What of it lies in the first `depth` levels and needs no more than `width` children."""
        return _truncate(self, depth, width)

    def levels(self) -> tuple[TemplateLevel, ...]:
        """All levels."""
        return _levels(self)


def tree_of_choices(choices: Iterable[Sequence[int]]) -> TreeTemplate:
    """The tree of these nodes.

    Raises:
        ValueError: a node whose parent is missing.
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
    """The complete tree whose nodes have so many children, from the root down."""
    ends = range(1, len(widths) + 1)
    return tree_of_choices(node for end in ends for node in product(*map(range, widths[:end])))


@lru_cache
def best_tree(
    nodes: int,
    rates: tuple[float, ...] = RATES,
    depth: int | None = None,
    width: int | None = None,
) -> TreeTemplate:
    """The tree of n nodes with the most tokens to expect, if ranks are right independently.

    Medusa's construction (Cai et al.): best first, by the product of the rates on a node's path.

    Args:
        rates: how often the child of each rank is the right one, not increasing.
        depth: most levels.
        width: most children of a node.
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
    """A draft of a template's shape after the last committed token.

    The model is called once for each level, `levels.begin` included. Which children are wanted is
    known beforehand: where reading them is a wait, nobody does.

    Args:
        template: no deeper than the `limit` that `propose` was given (`TreeTemplate.truncate`).
        levels: a draft model's or head's, after `begin`.
        first: what `begin` gave.
        how: how children are chosen where tokens are drawn, see `Session.branch`.
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
    """A draft of a template's shape from logits that are there for all levels (Medusa's).

    The children of all nodes of a level are the same tokens, the best of its row. Levels that have
    no row, or that the rest of the budget cannot use, are left out, and so is what a row rules out
    (-inf). Waits once.

    Args:
        logits: [levels, V] over the target's ids.
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
    last: list[Ranks] = [()]  # what was fed last
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
