"""Plug-in with a fault: its draft tokens are not drawn from the reported q."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class ConfidentParams(MethodParams):
    length: int = Field(3, ge=1, description="draft tokens a step")


class Confident(Method):
    """Method that drafts the draft model's most likely tokens at any temperature."""

    name = "confident"
    Params = ConfidentParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        picks = []
        x = session.pending_tokens(self.state.length())
        for ahead in range(min(self.params.length, limit)):
            out = self.model.forward(x, self.state)
            _, q = session.pick(out, ahead)
            token = out.logits[0, -1:].argmax(-1)
            picks.append((token, q))
            x = Tokens(token[None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
