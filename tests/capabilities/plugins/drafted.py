"""A draft model writes ahead, a token a forward (Leviathan et al., ICML 2023)."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class DraftedParams(MethodParams):
    """Parameters of `Drafted`."""

    length: int = Field(4, ge=1, description="draft tokens a step")


class Drafted(Method):
    """Drafted: a chain of a small model, which the target verifies in one forward.

    Exact because each token stands by the target's distribution and the one it was drawn from.
    """

    Params = DraftedParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)  # prefill

    def propose(self, session: Session, limit: int) -> Draft:
        picks, x = (
            [],
            session.pending_tokens(self.state.length()),
        )  # what has no row in the draft's state
        while len(picks) < min(limit, self.params.length):
            out = self.model.forward(x, self.state)
            picks.append(session.pick(out, len(picks)))  # a token, and what it was drawn from
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
