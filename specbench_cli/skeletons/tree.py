"""A method with a draft model, which drafts a tree of tokens.

Authors: Title, venue and year, arXiv number.
"""

from __future__ import annotations

from specbench_cli.api import (
    Draft,
    Field,
    GrownTree,
    Levels,
    Method,
    MethodParams,
    Outcome,
    Session,
    fill,
    tree_of_widths,
)


class SkeletonTreeParams(MethodParams):
    """Parameters of `SkeletonTree`."""

    width: int = Field(2, ge=1, description="children of the root; every other node has one child")
    depth: int = Field(3, ge=1, description="levels of the tree, one draft forward each")


class SkeletonTree(Method):
    """SkeletonTree: a small model drafts several continuations, verified in one target forward.

    Lossless because siblings are drawn without replacement and tested in the order of their draws,
    each against the residual of the target's distribution.

    One step:
    1. Feed the draft model the tokens that its state does not contain yet.
    2. Fill the tree level by level, one draft forward per level.
    3. (engine) One target forward over the last committed token and all nodes; verify; commit.
    4. Keep the draft model's state entries of accepted nodes.
    """

    name = "skeleton-tree"
    Params = SkeletonTreeParams
    params: SkeletonTreeParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Reserve space for the tree and prefill the draft model."""
        widths = (self.params.width, *[1] * (self.params.depth - 1))
        self.shape = tree_of_widths(widths).truncate(len(widths), session.target.vocab_size)
        self.levels = Levels.of_draft(
            session, nodes=len(self.shape.nodes), fed=1 + max(self.shape.fed)
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 and 2.

        Args:
            limit: Maximum number of levels that still fit.
        """
        self.grown = GrownTree(session.chain(()), ())
        if limit:
            root = self.levels.begin(session.pending_tokens(self.levels.state.length()))
            shape = self.shape.truncate(limit, session.target.vocab_size)
            self.grown = fill(shape, self.levels, root, session, how="without_replacement")
        return self.grown.draft

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Carry out step 4."""
        self.levels.keep(self.grown.rows(outcome.path))
