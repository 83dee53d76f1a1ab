"""N-gram cache of OmniDraft, which maps several draft tokens to one target token.

An n-gram is a sequence of draft tokens that together have the text of one target token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Spelling = Callable[[int], list[int]]
"""Function from a target token to the draft tokens with the same text, or [] if there are none."""


class NgramCache:
    """Cache of n-grams with a maximum size. The least recently seen n-gram is evicted.

    Args:
        most: Maximum number of n-grams.

    Attributes:
        trie: Trie over the draft tokens of all n-grams. If an n-gram ends at a node, the key `END`
            of the node contains the target token.
    """

    END = -1

    def __init__(self, most: int) -> None:
        self.trie: dict[int, Any] = {}
        self._most = most
        self._of: dict[int, list[int]] = {}  # n-grams by target token, least recently seen first

    def __len__(self) -> int:
        return len(self._of)

    def find_ngram(self, token: int, spelling: Spelling) -> list[int]:
        """Return the draft tokens for a target token, from the cache or from `spelling`."""
        return self._of.get(token) or spelling(token)

    def add_text(self, tokens: Iterable[int], spelling: Spelling) -> None:
        """Add the n-grams of all target tokens of a text."""
        for token in tokens:
            run = self.find_ngram(token, spelling)
            if len(run) > 1:
                self._of.pop(token, None)
                self._of[token], node = run, self.trie
                for each in run:
                    node = node.setdefault(each, {})
                node[self.END] = token
                if len(self._of) > self._most:
                    self._forget(next(iter(self._of)))

    def has_children(self, node: dict[int, Any]) -> bool:
        """Return True if a node of the trie has children."""
        return not node.keys() <= {self.END}

    def find_completions(self, node: dict[int, Any]) -> tuple[list[int], list[int]]:
        """Return the draft tokens that complete an n-gram after a node, and their target tokens."""
        found = {
            each: beyond[self.END]
            for each, beyond in node.items()
            if each != self.END and self.END in beyond
        }
        return [*found], [*found.values()]

    def _forget(self, token: int) -> None:
        run, nodes = self._of.pop(token), [self.trie]
        for each in run:
            nodes.append(nodes[-1][each])
        del nodes.pop()[self.END]
        for node, each in zip(reversed(nodes), reversed(run), strict=True):
            if not node[each]:
                del node[each]
