"""Suffix automaton of SAM-Decoding. It finds the longest suffix of a text that occurred before.

Anselm Blumer et al.: The Smallest Automaton Recognizing the Subwords of a Text, Theoretical
Computer Science, 1985. A state represents all strings that end at the same positions of the text.
Tokens are added one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Match = tuple[int, int]
"""A string of the automaton, as (state, length).

A later split may move the string to another state. Methods of `SuffixAutomaton` handle this.
"""

START: Match = (0, 0)
_NONE = -1

SEPARATOR = -1
"""Separator between texts. It is not a token id."""


class SuffixAutomaton:
    """Suffix automaton over texts. It stores the first occurrence of each substring.

    Adding a token takes amortised constant time. The automaton has at most 2 states and 3
    transitions per token.

    Attributes:
        text: All tokens. A `SEPARATOR` follows each text that `add` added.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._last = 0
        # Each list has one entry per state: transitions, suffix link, length of the longest string,
        # and index of the token at which the strings of the state end for the first time.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [_NONE], [0], [_NONE]

    def append(self, token: int) -> None:
        """Append a token to the last text."""
        following, link, length = self._next, self._link, self._length
        new = self._add_state({}, 0, length[self._last] + 1, len(self.text))
        self.text.append(token)
        at, self._last = self._last, new
        while at != _NONE and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at == _NONE:
            return
        old = following[at][token]
        if length[old] > length[at] + 1:
            # Only the shorter strings of the state `old` also end at the new token. Move them to a
            # new state.
            short = self._add_state(
                following[old].copy(), link[old], length[at] + 1, self._end[old]
            )
            link[old] = short
            while at != _NONE and following[at].get(token) == old:
                following[at][token] = short
                at = link[at]
            old = short
        link[new] = old

    def add(self, text: Sequence[int]) -> None:
        """Add a text, followed by a separator, so that no substring spans two texts."""
        for token in (*text, SEPARATOR):
            self.append(token)

    def follow(self, match: Match, token: int) -> Match:
        """Extend a match by the next token of the text. Return the longest suffix that occurs."""
        state, length = self._resolve(match)
        while token not in self._next[state]:
            state = self._link[state]
            if state == _NONE:
                return START
            length = self._length[state]
        return self._next[state][token], length + 1

    def get_continuation(self, match: Match, n: int, min_tokens: int = 0) -> Sequence[int]:
        """Return up to n tokens after the first occurrence of a match.

        The result ends where that text ends.

        Args:
            match: The match.
            n: Maximum number of tokens.
            min_tokens: Minimum number of tokens. If fewer tokens follow the match, use its longest
                suffix that enough tokens follow. If there is none, use its shortest suffix.
        """
        state, _ = self._resolve(match)
        while len(self.text) - 1 - self._end[state] < min_tokens and self._link[state] > 0:
            state = self._link[state]
        first = self._end[state] + 1
        found = self.text[first : first + n] if state else []
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixAutomaton:
        """Return a copy. The generic deepcopy is slower."""
        twin = SuffixAutomaton()
        twin.text, twin._last = self.text.copy(), self._last
        twin._next = [each.copy() for each in self._next]
        twin._link, twin._length = self._link.copy(), self._length.copy()
        twin._end = self._end.copy()
        return twin

    def _resolve(self, match: Match) -> Match:
        """Return a match with its current state.

        Appending tokens may move its string to a new state.
        """
        state, length = match
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state, length

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1
