"""A draft model checks a copied continuation in one forward. Recurrent states work too."""

import torch

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class CheckedLookupParams(MethodParams):
    length: int = Field(4, ge=1, description="draft tokens a step")


class CheckedLookup(Method):
    """Checked lookup: copies what followed the last two tokens, as far as the draft model
    agrees."""

    name = "checked-lookup"
    Params = CheckedLookupParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        if not limit:
            return session.chain(())
        text = list(session.tokens())
        ends = [at for at in range(2, len(text)) if text[at - 2 : at] == text[-2:]]
        guess = text[ends[-1] :][: min(limit, self.params.length) - 1] if ends else []
        pending = session.pending_tokens(
            self.state.length()
        ).ids  # a recurrent state may lack several tokens
        n, copied = (
            pending.shape[1],
            torch.tensor([guess], dtype=torch.int64, device=session.device),
        )
        x = Tokens(torch.cat((pending, copied), 1))
        out = self.model.forward(x, self.state, logits_at="all")
        own = out.logits[0, n - 1 :].argmax(-1).tolist()
        agreed = next((at for at, token in enumerate(guess) if token != own[at]), len(guess))
        self.state.commit(0, range(n + agreed))
        return session.chain([*guess[:agreed], own[agreed]])

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, len(session.tokens()) - 1)
