"""Structure of a token tree, and the mask and positions of a forward over it.

One forward scores all nodes (SpecInfer, Miao et al., ASPLOS 2024, arXiv:2305.09781). Each node
attends only to the text and its ancestors (tree attention). Its position is its depth after the
text.

Nodes are numbered 0..m-1, parents before their children. `ROOT`, -1, is the last committed token.
In a forward over the root and the nodes, row `node + 1` belongs to `node`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specbench_cli.engine import host

ROOT = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Tree of m nodes; see `build_tree`.

    Attributes:
        parents: Each node's parent, `ROOT` or a lower node.
        depths: Level of each node, from 1.
        children: Children of each node in the order of their tests. The last entry, at index
            `ROOT`, is the root's.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def levels(self) -> int:
        """Number of nodes on the longest path."""
        return max(self.depths, default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`. Empty for `ROOT`."""
        up = []
        while node != ROOT:
            up.append(node)
            node = self.parents[node]
        return tuple(reversed(up))

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Return the path of every leaf."""
        return (self.path(node) for node in range(len(self.parents)) if not self.children[node])


@lru_cache(maxsize=256)
def build_tree(parents: tuple[int, ...], order: tuple[int, ...] | None = None) -> Tree:
    """Return the tree of valid `parents`. The result is cached, because drafts repeat shapes.

    Args:
        parents: Each node's parent, `ROOT` or a lower node.
        order: All nodes, in the order in which siblings are tested. Default: as numbered.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in range(len(parents)) if order is None else order:
        children[parents[node]].append(node)
    return Tree(parents, tuple(depths), tuple(map(tuple, children)))


@lru_cache(maxsize=256)
def build_tree_mask(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mask and the depths of a forward over the root and all nodes.

    They are cached: do not change them.

    Returns:
        (mask, depths). The mask [m + 1, m + 1] bool is True where row i attends to row j: an
        ancestor, or i itself. The depths [m + 1] int64 are the positions relative to the root.
    """
    n = len(parents) + 1
    depths = [0] * n
    flags = bytearray(n * n)
    flags[0] = 1
    for row, parent in enumerate(parents, start=1):
        above = parent + 1
        depths[row] = depths[above] + 1
        # A row attends to the rows that its parent attends to, and to itself.
        flags[row * n : row * n + row] = flags[above * n : above * n + row]
        flags[row * n + row] = 1
    mask = torch.frombuffer(flags, dtype=torch.bool).view(n, n)
    return host.send(mask, device), host.ids(depths, device)


@dataclass(frozen=True, slots=True)
class MergedTree:
    """Several trees as one; see `merge_trees`.

    Attributes:
        ids: Token id of each node.
        parents: Parent of each node, as in `Tree`.
        places: For each merged tree, the indices of its nodes in this one.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


def merge_trees(parts: Iterable[tuple[Sequence[int], Sequence[int] | None]]) -> MergedTree:
    """Merge several trees into one. Nodes with the same path of tokens become one node.

    Nodes are in the order of the trees. Use it only for tokens that were not drawn: if several
    trees contain a drawn token, its draft distribution is unknown.

    Args:
        parts: (ids, parents) of each tree. `parents` is None for a chain.
    """
    found: dict[tuple[int, int], int] = {}
    places = []
    for ids, parents in parts:
        here: list[int] = []
        for node, token in enumerate(ids):
            parent = node - 1 if parents is None else parents[node]
            key = (ROOT if parent == ROOT else here[parent], token)
            here.append(found.setdefault(key, len(found)))
        places.append(tuple(here))
    return MergedTree(
        tuple(token for _, token in found), tuple(parent for parent, _ in found), tuple(places)
    )


def find_child(tree: Tree, tokens: Sequence[int], node: int, token: int) -> int | None:
    """Return the first child of a node with a given token, or None."""
    return next((child for child in tree.children[node] if tokens[child] == token), None)
