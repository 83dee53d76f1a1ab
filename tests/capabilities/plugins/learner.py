"""A draft model that learns from its rejected tokens while it serves (Liu et al., 2310.07177)."""

import torch

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class LearnerParams(MethodParams):
    rate: float = Field(0.03, ge=0, description="learning rate; 0: the draft stays as it is")


class Learner(Method):
    """Learner: speculative sampling with its own copy of the draft, trained on rejected tokens."""

    name, Params, needs, state_scope = "learner", LearnerParams, frozenset({"draft"}), "run"

    def start(self, session: Session) -> None:
        self.draft, self.missed = session.trainable("draft"), []
        self.state = session.new_state(self.draft)
        self.draft.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        x, picks = session.pending_tokens(self.state.length()), []
        for ahead in range(min(4, limit)):
            picks.append(session.pick(self.draft.forward(x, self.state), ahead))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.missed += [len(session.tokens()) - 1] * (outcome.origin[-1] == "recovered")
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))

    def learn(self, session: Session) -> None:
        ids = torch.tensor(session.tokens(), device=session.device)
        sgd = torch.optim.SGD(self.draft.module.parameters(), self.params.rate)
        for _ in range(4 if self.missed else 0):
            rows = self.draft.module(ids[None]).logits[0].roll(1, 0)[self.missed]
            torch.nn.functional.cross_entropy(rows, ids[self.missed]).backward()
            sgd.step()
            sgd.zero_grad()
