"""Who wrote how many tokens, and what became of them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

Author = Literal["draft", "target", "method"]
"""Who wrote a token: a model, or the method itself, whose words no model generated."""


class TokenAccounting:
    """Tokens of each author: generated, of these kept in the text or discarded; and scored ones.

    kept + discarded = generated, for each, at the end of every step: a method that drops what it
    threw away looks cheaper than it is. Scored are tokens that the target read to judge them,
    whoever wrote them, a question about them included; they are counted apart.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._reported = Counter[str]()

    def record_generated(self, author: Author, n: int) -> None:
        """A model wrote n tokens."""
        self._counts[f"{author}_generated"] += n

    def record_settled(self, author: Author, kept: int, discarded: int) -> None:
        """Of what a model wrote so many tokens stand in the text, and so many do not."""
        self._counts[f"{author}_kept"] += kept
        self._counts[f"{author}_discarded"] += discarded

    def record_scored(self, n: int) -> None:
        """The target read n tokens to judge them."""
        self._counts["scored"] += n

    def __getitem__(self, name: str) -> int:
        """A count so far: "draft_kept", "target_generated", "scored"."""
        return self._counts[name]

    @property
    def balanced(self) -> bool:
        """Whether nothing that was generated is missing."""
        return not any(unsettled_tokens(self._counts).values())

    def take_new_counts(self) -> dict[str, int]:
        """What was counted since it was last told, for the step that is yielded next."""
        found = {name: n - self._reported[name] for name, n in self._counts.items()}
        self._reported = Counter(self._counts)
        return {name: n for name, n in found.items() if n}


def unsettled_tokens(counts: Counter[str]) -> dict[Author, int]:
    """By model, tokens of a ledger's counts that were generated, and neither kept nor discarded."""
    return {
        author: counts[f"{author}_generated"]
        - counts[f"{author}_kept"]
        - counts[f"{author}_discarded"]
        for author in get_args(Author)
    }
