"""A method without a draft model: the draft comes from earlier text.

Authors: Title, venue and year, arXiv number.
"""

from __future__ import annotations

from specbench_cli.api import Draft, Field, Method, MethodParams, Session


class SkeletonLookupParams(MethodParams):
    """Parameters of `SkeletonLookup`."""

    ngram: int = Field(3, ge=1, description="length of the suffix that is looked up")
    length: int = Field(5, ge=1, description="draft tokens per step")


class SkeletonLookup(Method):
    """SkeletonLookup: the draft is what followed the last occurrence of the newest tokens.

    Lossless because the draft depends only on the text so far, and verification accepts each draft
    token or replaces it with the target's own.

    One step:
    1. Find the last earlier occurrence of the newest `ngram` tokens.
    2. Draft the `length` tokens that followed it.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name = "skeleton-lookup"
    Params = SkeletonLookupParams
    params: SkeletonLookupParams

    def propose(self, session: Session, limit: int) -> Draft:
        """Carry out steps 1 and 2.

        Args:
            limit: Maximum number of draft tokens that still fit.
        """
        text, n = list(session.tokens()), self.params.ngram
        suffix = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                continuation = text[start + n :][: self.params.length]
                return session.chain(continuation[:limit])
        return session.chain([])
