"""A suffix automaton that grows token by token: which suffix of a text occurs in another.

Anselm Blumer et al.: The Smallest Automaton Recognizing the Subwords of a Text, Theoretical
Computer Science, 1985. Each state stands for the strings that end at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Match = tuple[int, int]
"""The state that a string is in, and its length. Once states were divided it may be in another by
then: `SuffixAutomaton` looks."""

START: Match = (0, 0)
_NONE = -1

SEPARATOR = -1
"""Stands between texts; no token of any."""


class SuffixAutomaton:
    """All substrings of a text, and where each first ended.

    A token takes a constant number of operations in the mean. There are at most 2 states and 3
    transitions a token.

    Attributes:
        text: what it holds, `SEPARATOR` behind each text that was `add`ed.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._last = 0
        # Of each state: transitions, suffix link, length of its longest string, first end.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [_NONE], [0], [_NONE]

    def append(self, token: int) -> None:
        """Make the text longer by a token."""
        following, link, length = self._next, self._link, self._length
        new = self._state({}, 0, length[self._last] + 1, len(self.text))
        self.text.append(token)
        at, self._last = self._last, new
        while at != _NONE and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at == _NONE:
            return
        old = following[at][token]
        if length[old] > length[at] + 1:
            # The shorter strings of `old` end here too, the longer ones do not: it is divided.
            short = self._state(following[old].copy(), link[old], length[at] + 1, self._end[old])
            link[old] = short
            while at != _NONE and following[at].get(token) == old:
                following[at][token] = short
                at = link[at]
            old = short
        link[new] = old

    def add(self, text: Sequence[int]) -> None:
        """Hold another text, no string of which goes on into the next."""
        for token in (*text, SEPARATOR):
            self.append(token)

    def follow(self, match: Match, token: int) -> Match:
        """The longest suffix that occurs in the text, of a match's string and a token behind it."""
        state, length = self._resolve(match)
        while token not in self._next[state]:
            state = self._link[state]
            if state == _NONE:
                return START
            length = self._length[state]
        return self._next[state][token], length + 1

    def after(self, match: Match, n: int, least: int = 0) -> Sequence[int]:
        """Up to n tokens behind the first occurrence of a match, within its text.

        Args:
            least: how many there must be; of a string that ended later the longest suffix is taken
                which has so many behind it. Where none has: what is behind its shortest one.
        """
        state, _ = self._resolve(match)
        while len(self.text) - 1 - self._end[state] < least and self._link[state] > 0:
            state = self._link[state]
        first = self._end[state] + 1
        found = self.text[first : first + n] if state else []
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixAutomaton:
        """Runs copy what methods keep, and nothing in here needs the general way."""
        twin = SuffixAutomaton()
        twin.text, twin._last = self.text.copy(), self._last
        twin._next = [each.copy() for each in self._next]
        twin._link, twin._length = self._link.copy(), self._length.copy()
        twin._end = self._end.copy()
        return twin

    def _resolve(self, match: Match) -> Match:
        """A match in the state that its string is in by now."""
        state, length = match
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state, length

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1
