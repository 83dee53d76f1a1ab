"""Batched speculative sampling: the draft model makes one forward per token for all sequences."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class BatchedParams(MethodParams):
    length: int = Field(4, ge=1, description="draft tokens a step")


class Batched(Method):
    """Batched: drafts of all sequences advance together, with one draft forward per token."""

    Params = BatchedParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        self.model = session.draft()
        self.state = session.new_state(self.model)

    def propose(self, session: Session, limit: int) -> Draft:
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members) -> list[Draft]:
        picks = [[] for _ in members]
        x = [session.pending_tokens(method.state.length()) for method, session in members]
        for ahead in range(self.params.length):
            due = [at for at, (_, each) in enumerate(members) if ahead < each.max_draft_length()]
            if not due:
                break
            parts = [members[at][1].batch_input(x[at], members[at][0].state) for at in due]
            for at, out in zip(due, self.model.forward_batch(parts), strict=True):
                picks[at].append(members[at][1].pick(out, ahead))
                x[at] = Tokens(picks[at][-1][0][None])
        return [each.chain_of_picks(own) for (_, each), own in zip(members, picks, strict=True)]

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
