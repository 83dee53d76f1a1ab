"""A draft that attends to attention sinks and a recent window (StreamingLLM, arXiv:2309.17453)."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class WindowedParams(MethodParams):
    length: int = Field(3, ge=1, description="draft tokens a step")
    sinks: int = Field(1, ge=0, description="rows kept from the text's beginning")
    window: int = Field(4, ge=2, description="rows kept from its end")


class Windowed(Method):
    """Windowed: the draft's state keeps a fixed number of rows of a text of any length."""

    Params = WindowedParams
    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        self.model = session.draft()
        self.state = session.new_state(self.model)

    def propose(self, session: Session, limit: int) -> Draft:
        state, params, picks = self.state, self.params, []
        x = session.pending_tokens(state.position())
        for ahead in range(min(params.length, limit)):
            out = self.model.forward(x, state)
            if not ahead:
                n = state.length()
                if n > params.sinks + params.window:  # no row was dropped so far
                    state.select([*range(params.sinks), *range(n - params.window, n)])
            picks.append(session.pick(out, ahead))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        self.state.rollback(0, min(self.state.position(), len(session.tokens()) - 1))
