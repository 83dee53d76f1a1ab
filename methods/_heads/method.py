"""Drafting with a head: it reads the target's true features, and forgets what it drafted."""

from __future__ import annotations

from typing import ClassVar

from methods._heads.layer import LayerHead
from specbench_cli.api import Draft, Field, Method, MethodParams, Session, Trained
from specbench_cli.engine.drafting.growth import Nodes, grow, most, size_of
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.params import AUTO


class HeadParams(MethodParams):
    """Parameters of every method that drafts with a head."""

    head: str = Field("auto", description="auto: the target's own; else the folder of one")


class HeadMethod(Method):
    """A method that drafts level by level with a head of its kind.

    Attributes:
        head: the head's class.
        levels: the head with its state; all rows in it are of true features, once a draft is made.
    """

    head: ClassVar[type[LayerHead]]
    params: HeadParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})

    def artifacts(self) -> tuple[Trained, ...]:
        """The head."""
        return (Trained(self.head, self.params.head),)

    def ready(self, session: Session, *, fed: int) -> None:
        """Have the target keep what the head reads; make room to feed it so many nodes a step."""
        head = session.artifact(*self.artifacts())
        session.tap(head.taps)
        self.levels = Levels(session, head, session.new_state(head, slack=fed))


class GrowingParams(HeadParams):
    """Parameters of `GrowingTree`."""

    nodes: Nodes = Field(
        16,
        description="size of the tree (59 and the root in the authors' code), or auto: as many as"
        " pay at what forwards cost here",
    )
    depth: int = Field(5, ge=1, description="levels of the tree: one forward of the head each")
    width: int = Field(
        4, ge=1, description="nodes fed at a level, and children of each (10 in the authors' code)"
    )


class GrowingTree(HeadMethod):
    """A head whose tree grows where it is sure of itself: what EAGLE-2 and EAGLE-3 have in common.

    The numbers are those of the steps in their docstrings.
    """

    Params: ClassVar[type[MethodParams]] = GrowingParams
    params: GrowingParams
    tunable: ClassVar[frozenset[str] | None] = frozenset({"nodes", "depth", "width"})

    @property
    def uses_costs(self) -> bool:
        """To choose the tree's size."""
        return self.params.nodes == AUTO

    def start(self, session: Session) -> None:
        """Make room for the tree."""
        params = self.params
        session.reserve(most(params.nodes))
        self.ready(session, fed=params.width * (params.depth - 1))

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 to 3."""
        params, levels = self.params, self.levels
        depth = min(params.depth, limit)
        if depth < 1:
            return session.chain(())
        # 1. True features of what was committed.
        first = levels.begin(session.unread(levels.state.length()))
        # 2. and 3. The tree.
        nodes, width = params.nodes, params.width
        size = size_of(session, levels.model, nodes, width=width, depth=depth)
        grown = grow(levels, first, session, k=width, depth=depth, nodes=most(nodes), size=size)
        levels.drop()
        return grown.draft
