"""A tree of draft tokens from a draft model (SpecInfer: Miao et al., ASPLOS 2024)."""

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


class TreeParams(MethodParams):
    """Parameters of `Tree`."""

    width: int = Field(2, ge=1, description="children of the root; each further node has one")
    depth: int = Field(3, ge=1, description="levels, a forward of the draft each")


class Tree(Method):
    """Tree: several continuations by a draft model, verified in one forward of the target.

    Lossless because siblings are drawn without replacement and tested in the order of their draws.
    """

    Params = TreeParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        widths = (self.params.width, *[1] * (self.params.depth - 1))
        self.shape = tree_of_widths(widths).truncate(len(widths), session.target.vocab_size)
        session.reserve(len(self.shape.nodes))  # space in the target's state
        model = session.draft()
        state = session.new_state(model, slack=1 + max(self.shape.fed))
        self.levels = Levels(session, model, state)
        self.levels.begin(session.pending_tokens(0))  # prefill

    def propose(self, session: Session, limit: int) -> Draft:
        self.grown = GrownTree(session.chain(()), ())
        if limit:
            root = self.levels.begin(session.pending_tokens(self.levels.state.length()))
            shape = self.shape.truncate(limit, session.target.vocab_size)
            self.grown = fill(shape, self.levels, root, session, how="without_replacement")
        return self.grown.draft

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.levels.keep(self.grown.rows(outcome.path))  # keep the rows of accepted nodes
