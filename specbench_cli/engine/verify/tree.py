"""Structure of a draft tree, and the mask and positions of a forward over it.

One forward scores all nodes (SpecInfer, Miao et al., ASPLOS 2024, arXiv:2305.09781). Each node
attends only to the text, to its ancestors and to itself (tree attention). The position of a node is
the text length plus its depth.

Nodes are numbered 0 to m - 1, parents before their children. `ROOT`, which is -1, is the last
committed token. In a forward over the root and the nodes, row `node + 1` belongs to `node`.
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
    """Tree of m nodes, as `build_tree` returns it.

    Attributes:
        parents: Parent of each node: `ROOT` or a node with a lower number.
        depths: Level of each node, from 1.
        children: Children of each node, in the order in which verification tests them. The last
            entry, at index `ROOT`, has the children of the root.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def levels(self) -> int:
        """Number of nodes on the longest path from the root."""
        return max(self.depths, default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes on the path from the root to `node`, without the root.
        Empty for `ROOT`."""
        up = []
        while node != ROOT:
            up.append(node)
            node = self.parents[node]
        return tuple(reversed(up))

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Yield the path from the root to each leaf."""
        return (self.path(node) for node in range(len(self.parents)) if not self.children[node])


@lru_cache(maxsize=256)
def build_tree(parents: tuple[int, ...], order: tuple[int, ...] | None = None) -> Tree:
    """Return the tree with the given parents. The result is cached, because drafts repeat shapes.

    Args:
        parents: Parent of each node: `ROOT` or a node with a lower number.
        order: All nodes, in the order in which verification tests siblings. Default: by number.
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

    Both tensors are cached. Callers must not change them.

    Returns:
        (mask, depths). The mask, bool [m + 1, m + 1], is True where row i attends to row j: j is an
        ancestor of i, or i itself. The depths, int64 [m + 1], are the positions relative to the
        root.
    """
    n = len(parents) + 1
    depths = [0] * n
    flags = bytearray(n * n)
    flags[0] = 1
    for row, parent in enumerate(parents, start=1):
        above = parent + 1
        depths[row] = depths[above] + 1
        # A row attends to itself and to all rows that its parent attends to.
        flags[row * n : row * n + row] = flags[above * n : above * n + row]
        flags[row * n + row] = 1
    mask = torch.frombuffer(flags, dtype=torch.bool).view(n, n)
    return host.send(mask, device), host.ids(depths, device)


@dataclass(frozen=True, slots=True)
class MergedTree:
    """Several trees merged into one, as `merge_trees` returns them.

    Attributes:
        ids: Token id of each node.
        parents: Parent of each node, as in `Tree`.
        places: For each original tree, the indices of its nodes in the merged tree.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


def merge_trees(parts: Iterable[tuple[Sequence[int], Sequence[int] | None]]) -> MergedTree:
    """Merge several trees into one. Nodes with the same path of tokens become one node.

    Nodes are in the order of the trees. Use the function only for tokens that were not drawn. If
    several trees contained the same drawn token, its draft distribution would be unknown.

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
    """Return the first child of a node with a given token, or None if there is none."""
    return next((child for child in tree.children[node] if tokens[child] == token), None)
