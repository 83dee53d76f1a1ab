"""Parameters of methods that grow a dynamic draft tree.

Code that only plans a run imports this module, so it does not import torch.
"""

from __future__ import annotations

from pydantic import Field

from specbench_cli.engine.params import AUTO, MethodParams, NumberOrAuto

MAX_AUTO_NODES = 63
"""Maximum tree size under "auto". With the root, it is the largest forward with a measured cost."""


Nodes = NumberOrAuto
"""Type of a method parameter: number of tree nodes, or "auto"."""


class GrowthParams(MethodParams):
    """Parameters of a method whose draft head grows a dynamic tree, as in EAGLE-2 and EAGLE-3."""

    head: str = Field(
        "auto", description="folder of the head, or auto for the one registered for the target"
    )
    nodes: Nodes = Field(
        16,
        description="number of tree nodes (in the authors' code: 59, plus the root), or auto for"
        " the number with the best predicted speed, given measured forward costs",
    )
    depth: int = Field(5, ge=1, description="tree depth. Each level takes one head forward")
    width: int = Field(
        4,
        ge=1,
        description="number of nodes expanded per level, and of children per node (in the authors'"
        " code: 10)",
    )


def max_nodes(nodes: Nodes) -> int:
    """Return the maximum number of tree nodes that the parameter `nodes` allows."""
    return MAX_AUTO_NODES if nodes == AUTO else nodes
