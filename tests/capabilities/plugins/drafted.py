"""Speculative sampling: a draft model drafts one token per forward (Leviathan et al., ICML
2023)."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class DraftedParams(MethodParams):
    """Parameters of `Drafted`."""

    length: int = Field(4, ge=1, description="draft tokens a step")


class Drafted(Method):
    """Drafted: a chain of draft tokens that the target verifies in one forward.

    Lossless because each token is verified with p and with the q it was drawn from.
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
        )  # tokens that the draft has not processed
        while len(picks) < min(limit, self.params.length):
            out = self.model.forward(x, self.state)
            picks.append(session.pick(out, len(picks)))  # a token and its q
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
