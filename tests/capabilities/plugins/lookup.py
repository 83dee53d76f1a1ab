"""Prompt lookup: no model drafts (Saxena, 2023)."""

from specbench_cli.api import Draft, Field, Method, MethodParams, Session


class LookupParams(MethodParams):
    """Parameters of `Lookup`."""

    ngram: int = Field(2, ge=1, description="tokens that are looked up")
    length: int = Field(4, ge=1, description="draft tokens a step")


class Lookup(Method):
    """Lookup: the draft is what followed the last earlier occurrence of the newest tokens.

    Lossless because the draft depends on the text only: its tokens are deterministic, not drawn.
    """

    Params = LookupParams

    def propose(self, session: Session, limit: int) -> Draft:
        text, n = list(session.tokens()), self.params.ngram
        ends = [at for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
        behind = text[ends[-1] :] if ends else []
        return session.chain(behind[: min(limit, self.params.length)])
