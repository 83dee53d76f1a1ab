"""Static trees of the heads of Medusa, Hydra, Hydra++ and Falcon."""

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
"""Tree `mc_sim_7b_63` of the code of Medusa and Hydra. Each node is the ranks on its path.

Nodes are in the order in which the authors' search chose them. The first n nodes are therefore the
best n, and parents come before their children.
"""


class TreeParams(MethodParams):
    """Parameters of a static tree."""

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
        nodes: maximum number of nodes. The first nodes of a published tree are kept.
        depth: maximum number of levels.
        width: maximum number of children of a node.
        choices: nodes of the published tree, the best first.
    """
    if tree == "likeliest":
        return best_tree(nodes, depth=depth, width=width)
    return tree_of_choices(choices[:nodes]).truncate(depth, width or nodes)
