"""Token accounting: how many tokens each author wrote, and how many of them were kept."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

Author = Literal["draft", "target", "method"]
"""Author of a token: a model, or the method itself for tokens that no model generated."""


class TokenAccounting:
    """Numbers of generated, kept and discarded tokens of each author, and of scored tokens.

    An author is a model that writes text. At the end of each step, kept + discarded = generated
    holds for each author. Audits check this, because a method that did not count its discarded
    tokens would look cheaper than it is. Scored tokens are those that the target read to judge a
    segment, including questions. They are counted separately.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._reported = Counter[str]()

    def record_generated(self, author: Author, n: int) -> None:
        """Record that an author wrote n tokens."""
        self._counts[f"{author}_generated"] += n

    def record_settled(self, author: Author, kept: int, discarded: int) -> None:
        """Record how many of an author's tokens were kept and how many were discarded."""
        self._counts[f"{author}_kept"] += kept
        self._counts[f"{author}_discarded"] += discarded

    def record_scored(self, n: int) -> None:
        """Record that the target read n tokens to judge a segment."""
        self._counts["scored"] += n

    def __getitem__(self, name: str) -> int:
        """Return a count by name, such as "draft_kept", "target_generated" or "scored"."""
        return self._counts[name]

    @property
    def balanced(self) -> bool:
        """True if each generated token was either kept or discarded."""
        return not any(unsettled_tokens(self._counts).values())

    def take_new_counts(self) -> dict[str, int]:
        """Return the increase of each count since the last call, to report it with
        the next step."""
        found = {name: n - self._reported[name] for name, n in self._counts.items()}
        self._reported = Counter(self._counts)
        return {name: n for name, n in found.items() if n}


def unsettled_tokens(counts: Counter[str]) -> dict[Author, int]:
    """Return, for each author, the number of tokens that were neither kept nor discarded so far."""
    return {
        author: counts[f"{author}_generated"]
        - counts[f"{author}_kept"]
        - counts[f"{author}_discarded"]
        for author in get_args(Author)
    }
