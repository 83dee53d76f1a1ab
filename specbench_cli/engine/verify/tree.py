"""The shape of a token tree: who follows whom, and how a forward over the whole tree must look.

SpecInfer (Miao et al., ASPLOS 2024, arXiv:2305.09781): all nodes go through one forward,
in which a node sees its ancestors alone ("tree attention") and stands at the position that it has
on its own path.

Nodes are numbered 0..m-1, a parent before its children. `ROOT`, -1, is the last committed token,
so that row `node + 1` of a forward over the root and the nodes belongs to `node`.
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
    """A tree of m nodes; made by `tree_of`.

    Attributes:
        parents: each node's parent, `ROOT` or a lower node.
        depths: of each node, from 1; its level.
        children: of each node, in the order of their tests; the last entry, which index `ROOT`
            names, is the root's.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def levels(self) -> int:
        """Nodes on the longest path."""
        return max(self.depths, default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`; nothing for `ROOT`."""
        up = []
        while node != ROOT:
            up.append(node)
            node = self.parents[node]
        return tuple(reversed(up))

    def paths(self) -> Iterator[tuple[int, ...]]:
        """The path of every leaf."""
        return (self.path(node) for node in range(len(self.parents)) if not self.children[node])


@lru_cache(maxsize=256)
def build_tree(parents: tuple[int, ...], order: tuple[int, ...] | None = None) -> Tree:
    """The tree that well-formed `parents` describe; kept, since templates come again.

    Args:
        parents: each node's parent, `ROOT` or a lower node.
        order: all nodes, in the order in which siblings are tested; default: as numbered.
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
    """What a forward over the root and all nodes needs, besides their ids; not to be changed.

    Returns:
        (mask, depths): [m + 1, m + 1] bool, row i sees row j, its ancestor or itself; and [m + 1]
        int64, how far each row's position lies behind the root's.
    """
    n = len(parents) + 1
    depths = [0] * n
    cells = bytearray(n * n)
    cells[0] = 1
    for row, parent in enumerate(parents, start=1):
        above = parent + 1
        depths[row] = depths[above] + 1
        # What its parent sees, no row after that, and itself.
        cells[row * n : row * n + row] = cells[above * n : above * n + row]
        cells[row * n + row] = 1
    mask = torch.frombuffer(cells, dtype=torch.bool).view(n, n)
    return host.send(mask, device), host.ids(depths, device)


@dataclass(frozen=True, slots=True)
class MergedTree:
    """Several trees as one; made by `merge`.

    Attributes:
        ids: of each node.
        parents: of each node, as in `Tree`.
        places: for each part, where its nodes are.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


def merge_trees(parts: Iterable[tuple[Sequence[int], Sequence[int] | None]]) -> MergedTree:
    """One tree that holds every path of several; nodes with equal paths become one.

    Nodes come in the order of the parts. The tokens of none may have been drawn: what a path's
    distribution is cannot be said of it if others led to it too.

    Args:
        parts: (ids, parents) of each; None for a chain.
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
    """The first child of a node that holds a token, None if there is none."""
    return next((child for child in tree.children[node] if tokens[child] == token), None)
