"""Falcon's decoding tree, for heads that draft several tokens per forward."""

from __future__ import annotations

from specbench_cli.api import Template, best_tree, tree_of_choices

KMASK2_8LAYER_TREE = tuple(
    (*map(int, node), rank)
    for node, n in (
        entry.split(":")
        for entry in (
            ":20 0:10 1:2 2:2 3:1 00:10 01:2 02:2 03:1 10:2 20:1 30:1 000:10 001:2 002:1 010:2"
            " 011:1 020:1 021:1 030:1 100:2 200:1 300:1 0000:10 0001:2 0002:1 0010:1 0020:1"
            " 0100:1 0200:1 0300:1 1000:1 2000:1 3000:1 00000:9 00001:2 00002:1 00010:1 00011:1"
            " 00020:1 00100:1 00200:1 01000:1 02000:1 03000:1 10000:1 20000:1 30000:1 000000:9"
            " 000001:2 000002:1 000010:1 000100:1 001000:1 002000:1 010000:1 020000:1 030000:1"
            " 100000:1 200000:1 0000000:8 0000001:2 0000002:1 0000010:1 0000011:1 0000020:1"
            " 0000100:1 0001000:1 0010000:1 0020000:1 0100000:1 0200000:1 0300000:1"
            " 1000000:1 2000000:1"
        ).split()
    )
    for rank in range(int(n))
)
"""The tree `kmask2_8layer_tree` of Falcon's code, level by level; above, how many children each of
its inner nodes has."""


def decoding_tree(tree: str, nodes: int, depth: int, width: int) -> Template:
    """Return the decoding tree with this name.

    Args:
        nodes: maximum number of nodes. The first nodes of the authors' tree are kept.
        depth: maximum number of levels.
        width: maximum number of children of a node.
    """
    if tree == "likeliest":
        return best_tree(nodes, depth=depth, width=width)
    return tree_of_choices(KMASK2_8LAYER_TREE[:nodes]).within(depth, width)
