"""Static draft trees of Medusa, Hydra, Hydra++ and Falcon.

A static tree has the same shape in every decoding step. A node is written as the ranks on its path,
counted from 0. For example, (0, 2) is the third most likely child of the root's most likely child.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specbench_cli.api import Field, MethodParams, TreeTemplate, best_tree, tree_of_choices

MC_SIM_7B_63 = tuple(
    tuple(map(int, ranks))
    for ranks in (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12"
        " 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050"
        " 15 101 021 90 060 0001 16 070"
    ).split()
)
"""Tree `mc_sim_7b_63` of Medusa's and Hydra's code.

The nodes are in the order in which the authors' search added them. The first n nodes are therefore
the best tree of n nodes, and parents come before their children.
"""


class TreeParams(MethodParams):
    """Parameters of a static draft tree."""

    tree: Literal["likeliest", "mc_sim_7b_63"] = Field(
        "likeliest",
        description="shape of the tree: likeliest builds it from the ranks that are most likely"
        " to be accepted; mc_sim_7b_63 takes the first `nodes` nodes of the tree"
        " that Medusa's and Hydra's code uses for 7B models",
    )


def static_tree(
    tree: str,
    nodes: int,
    depth: int,
    width: int | None = None,
    choices: Sequence[tuple[int, ...]] = MC_SIM_7B_63,
) -> TreeTemplate:
    """Return the static tree with this name.

    Args:
        tree: "likeliest" computes the tree with the highest expected number of accepted tokens. Any
            other name selects the published tree.
        nodes: Maximum number of nodes. The published tree is cut to its first nodes.
        depth: Maximum number of levels.
        width: Maximum number of children of a node.
        choices: Nodes of the published tree, best first.
    """
    if tree == "likeliest":
        return best_tree(nodes, depth=depth, width=width)
    return tree_of_choices(choices[:nodes]).truncate(depth, width or nodes)
