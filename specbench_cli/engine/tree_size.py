"""How many nodes a tree that grows gets: a number, or as many as pay at what forwards cost here."""

from __future__ import annotations

from functools import partial

from specbench_cli.engine.auto import AUTO, NumberOrAuto
from specbench_cli.engine.growth import Size, best_size
from specbench_cli.engine.meter import Metered
from specbench_cli.engine.session import Session

MOST = 63
"""Nodes of a tree under "auto", at most: with its root it makes the largest forward measured."""


Nodes = NumberOrAuto
"""A method's parameter: nodes of a tree, or "auto"."""


def most(nodes: Nodes) -> int:
    """The largest tree that the parameter allows."""
    return MOST if nodes == AUTO else nodes


def size_of(
    session: Session, model: Metered, nodes: Nodes, *, width: int, depth: int
) -> Size | None:
    """What chooses a tree's size from its candidates' values; None where the size is a number.

    The time of a step is that of drafting, a forward over one row and `depth` - 1 over `width`,
    and of the target's forward; what the host does between them counts for nothing.

    Args:
        model: what drafts.
    """
    if nodes != AUTO:
        return None
    drafting = session.draft_cost(model) + (depth - 1) * session.draft_cost(model, width)
    return partial(best_size, cost=session.verify_cost, fixed=drafting)
