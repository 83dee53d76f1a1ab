"""Self-drafting: the first layers draft, all layers verify (LayerSkip: Elhoushi et al., ACL
2024)."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Session, Tokens


class SelfDraftParams(MethodParams):
    """Parameters of `SelfDraft`."""

    exit: int = Field(1, ge=1, description="layers of the target that draft")
    length: int = Field(4, ge=1, description="draft tokens a step")
    keep: bool = Field(False, description="go on from the layers that drafted, not from the start")


class SelfDraft(Method):
    """Self-drafting: the target's first layers draft a chain on the target's own state.

    Lossless because each token is verified with p and with the q it was drawn from.
    """

    name = "self-draft"
    Params = SelfDraftParams

    def start(self, session: Session) -> None:
        self.part = session.partial(layers=(0, self.params.exit), keep=self.params.keep)

    def propose(self, session: Session, limit: int) -> Draft:
        picks = []
        x = session.pending_tokens(session.state.length())
        while len(picks) < min(limit, self.params.length):
            out = self.part.forward(x, session.state)
            picks.append(session.pick(out, len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)
