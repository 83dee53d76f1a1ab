"""Prompt lookup decoding (PLD): drafts from earlier occurrences of the last tokens.

Apoorv Saxena: Prompt Lookup Decoding, November 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from specbench_cli.api import Draft, Field, Method, MethodParams, Session


class PldParams(MethodParams):
    """Parameters of `Pld`."""

    ngram: int = Field(
        3,
        ge=1,
        description="maximum length of the suffix to look up, in tokens (max_ngram_size;"
        " author's code: 3)",
    )
    length: int = Field(
        10, ge=1, description="number of draft tokens per step (num_pred_tokens; author's code: 10)"
    )
    rule: Literal["author", "transformers"] = Field(
        "author",
        description="author: only matches that are followed by `length` tokens; transformers:"
        " also matches that are followed by fewer, and no tokens after an EOS",
    )


class Pld(Method):
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the current suffix.

    Lossless because the draft depends only on earlier tokens. Draft tokens are not drawn at random.
    A node is accepted with the probability that the target gives its token. In greedy decoding and
    coupled sampling (all methods share the Gumbel noise), it is accepted if and only if the target
    chooses the same token.
    Differs from the author's code: suffixes longer than the text are skipped and raise no error.
    Without a match the step is plain decoding. The author's code drafts one arbitrary token.

    One step:
    1. For n = ngram, ..., 1, take the last n tokens, including the newest.
    2. Find the earliest occurrence of these n tokens that has a continuation. The author's rule
       requires `length` tokens after the occurrence. transformers' rule also accepts fewer tokens,
       and stops before an EOS.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "pld"
    aliases: ClassVar[tuple[str, ...]] = ("prompt-lookup",)
    family: ClassVar[str] = "earlier text"
    proposed_in: ClassVar[tuple[str, ...]] = ("saxena2023pld",)
    Params: ClassVar[type[MethodParams]] = PldParams
    params: PldParams

    def start(self, session: Session) -> None:
        """Create an empty n-gram index.

        `propose` later adds the prompt and the committed tokens.
        """
        self.index: dict[tuple[int, ...], int] = {}  # n-gram -> end of its first occurrence
        self.indexed = 0

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        params = self.params
        text = session.tokens()
        self._extend(text, params.ngram)
        for n in range(min(params.ngram, len(text) - 1), 0, -1):
            start = self.index[tuple(text[-n:])]
            if params.rule == "author":
                found = start + params.length <= len(text) and start < len(text) - n
            else:
                found = start < len(text)
            if found:
                window = text[start : start + params.length]
                if params.rule == "transformers":
                    window = self._before_eos(window, session.requests[0].stop.eos)
                return session.chain(window[:limit])
        return session.chain(())

    def _extend(self, text: Sequence[int], ngram: int) -> None:
        """Add the n-grams that end in new tokens to the index.

        The index keeps the earliest occurrence of each n-gram.
        """
        for end in range(self.indexed + 1, len(text) + 1):
            for n in range(1, min(ngram, end) + 1):
                self.index.setdefault(tuple(text[end - n : end]), end)
        self.indexed = len(text)

    @staticmethod
    def _before_eos(window: Sequence[int], eos: frozenset[int]) -> Sequence[int]:
        stops = (at for at, token in enumerate(window) if token in eos)
        return window[: next(stops, len(window))]
