"""Parameters of methods that grow a tree.

Plans read them, so this module does not import torch.
"""

from __future__ import annotations

from pydantic import Field

from specbench_cli.engine.params import AUTO, MethodParams, NumberOrAuto

MAX_AUTO_NODES = 63
"""Nodes of a tree under "auto", at most: with its root it makes the largest forward measured."""


Nodes = NumberOrAuto
"""A method's parameter: nodes of a tree, or "auto"."""


class GrowthParams(MethodParams):
    """Parameters of a method whose head grows a tree: EAGLE-2's, which EAGLE-3 keeps."""

    head: str = Field("auto", description="auto: the target's own; else the folder of one")
    nodes: Nodes = Field(
        16,
        description="size of the tree (59 and the root in the authors' code), or auto: as many as"
        " pay at what forwards cost here",
    )
    depth: int = Field(5, ge=1, description="levels of the tree: one forward of the head each")
    width: int = Field(
        4, ge=1, description="nodes fed at a level, and children of each (10 in the authors' code)"
    )


def max_nodes(nodes: Nodes) -> int:
    """The largest tree that the parameter allows."""
    return MAX_AUTO_NODES if nodes == AUTO else nodes
