"""Suffix tree with the count of each string. It grows token by token, and sequences can be removed.

Peter Weiner: Linear Pattern Matching Algorithms, SWAT 1973, with counts and a bound on the depth as
in SuffixDecoding (Oliaro et al., NeurIPS 2025, arXiv:2411.04975). An edge contains all tokens up to
the next branch, as a position in a text, not as a copy.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from methods.suffix.eviction import POLICIES, EvictionName

TreePosition = tuple[int, int]
"""String of the tree: the node on or above which it ends, and its length.

If the node's edge is split later, the string is in the upper half. `SuffixTree` resolves this.
"""

Continuation = tuple[list[int], list[int], float]
"""Continuation of a point as a tree: tokens, parents as in `Draft`, and the expected number of
accepted tokens.

The last is the sum of the probabilities of all paths.
"""

_TOP, _NONE = 0, -1


class OpenSequence:
    """A sequence of a `SuffixTree` that still grows.

    Attributes:
        text: the tokens of the sequence.
        ends: the suffixes that also occur elsewhere, longest first. Their continuations are known.
        leaves: the other suffixes as (start position, node). Each is a leaf that grows with the
            text. Suffixes of `depth` tokens or more are complete and not listed.
    """

    def __init__(self, depth: int) -> None:
        self.text: list[int] = []
        self.repeated: list[TreePosition] = []
        self.leaves: deque[tuple[int, int]] = deque(maxlen=depth)


class SuffixTree:
    """Suffix tree over all substrings of up to `depth` tokens of some sequences, with their counts.

    Args:
        eviction: Eviction policy. Its pages are the closed sequences, which are requested when they
            are closed and by `use`.

    `append` adds a token to an open sequence, and `close` ends it. One sequence is always open.
    `open` starts another one, for texts that grow at the same time. Overlapping occurrences all
    count. The end of an open sequence counts too, although no token follows it.

    Adding a token takes one operation per suffix of the text that occurs elsewhere. Other suffixes
    are leaves, which grow by themselves. There are at most 2 nodes per token, and `depth` more for
    each closed sequence.

    Attributes:
        held: Number of tokens of all sequences.
        evictions: Number of evicted sequences. Points from before an eviction are invalid.
    """

    def __init__(self, depth: int, eviction: EvictionName = "fifo") -> None:
        self.depth, self._eviction = depth, eviction
        self._policy = POLICIES[eviction]()
        self.num_tokens = self.evictions = 0
        self._sequences: dict[int, list[int]] = {}  # the closed ones, by number
        self._number = 0
        self._open: list[OpenSequence] = []
        self._first = self.open()
        # Per node: children by first token, parent, length of its string without and with its edge,
        # count, most frequent child, and a text that contains the string from some position on, up
        # to the end of the edge.
        self._kids: list[dict[int, int]] = [{}]
        self._parent, self._begin, self._end = [_NONE], [-1], [0]
        self._count, self._best = [0], [_NONE]
        self._text, self._from = [list[int]()], [0]
        self._newest = [_NONE]  # number of the last closed sequence that contains it
        self._free: list[int] = []
        self._stopped: dict[int, list[int]] | None = None  # cache of `_find_stops`

    # ---- adding and removing ---------------------------------------------------------------------

    @property
    def repeated(self) -> list[TreePosition]:
        """Suffixes of the default open sequence that also occur elsewhere, longest first."""
        return self._first.repeated

    def open(self) -> OpenSequence:
        """Begin another open sequence and return it."""
        self._open.append(OpenSequence(self.depth))
        return self._open[-1]

    def append(self, token: int, sequence: OpenSequence | None = None) -> None:
        """Add a token to an open sequence (default: the one that is always open)."""
        grown = sequence or self._first
        text = grown.text
        place = len(text)
        text.append(token)
        self.num_tokens += 1
        self._stopped = None
        parent, begin, end, kids = self._parent, self._begin, self._end, self._kids
        ends: list[TreePosition] = []
        due = [*grown.repeated, (_TOP, 0)]
        for number, (known, depth) in enumerate(due):
            node = known
            while depth <= begin[node]:  # its edge was split
                node = parent[node]
            if depth == end[node]:
                child = kids[node].get(token)
                if child is None:
                    self._add_leaf(grown, node, token, place - depth)
                    continue
                self._enter(child, node)
                node = child
            elif self._is_exhausted(node, depth):
                # This leaf belongs to another open text that ends here. This text takes it over.
                self._end_in_leaf(node, depth)
                self._text[node], self._from[node] = text, place - depth
                grown.leaves.append((place - depth, node))
                continue
            elif self._text[node][self._from[node] + depth] != token:
                # Shorter suffixes that end inside this edge end in its upper half.
                short = sum(self._resolve(*shorter) == node for shorter in due[number:])
                short += self._count_ending(node, depth, beside=grown)
                self._add_leaf(grown, self._split(node, depth, short), token, place - depth)
                continue
            if depth + 1 < self.depth:
                ends.append((node, depth + 1))
        grown.repeated = ends

    def close(self, sequence: OpenSequence | None = None) -> None:
        """End an open sequence.

        The default is the sequence that is always open; a new one replaces it.
        """
        ended = sequence or self._first
        text = ended.text
        if text:
            self._close(ended)
            self._sequences[self._number] = text
            self._policy.request(self._number)
            self._number += 1
        self._open.remove(ended)
        if ended is self._first:
            self._first = self.open()

    def _close(self, ended: OpenSequence) -> None:
        """Make every suffix of an open sequence end at a node."""
        text = ended.text
        self._stopped = None
        for start, node in ended.leaves:
            self._end[node] = min(self._end[node], len(text) - start)
        for known, depth in reversed(ended.repeated):  # a node marks where fewer suffixes continue
            node = self._resolve(known, depth)
            if depth < self._end[node]:
                if self._is_exhausted(node, depth):  # another open text ends here too
                    self._end_in_leaf(node, depth)
                    self._end[node] = depth
                else:
                    self._split(node, depth, 1 + self._count_ending(node, depth, beside=ended))
        ended.leaves.clear()
        ended.repeated = []
        for start in range(len(text)):  # a closed suffix ends at a node, so its path is complete
            node, depth, last = _TOP, 0, min(self.depth, len(text) - start)
            while depth < last:
                node = self._kids[node][text[start + depth]]
                self._newest[node], depth = self._number, self._end[node]

    def use(self, number: int | None) -> None:
        """Report to the policy that a sequence was useful. None and evicted sequences are
        ignored."""
        if number in self._sequences:
            self._policy.request(number)

    def evict(self, max_tokens: int) -> None:
        """Evict closed sequences, chosen by the policy, until at most `most` tokens remain."""
        for each in self._open:  # eviction may remove the node that a point refers to
            each.repeated = [(self._resolve(*point), point[1]) for point in each.repeated]
        while self.num_tokens > max_tokens and self._sequences:
            text = self._sequences.pop(self._policy.evict())
            self.evictions += 1
            self._stopped = None
            self.num_tokens -= len(text)
            for start in range(len(text)):
                self._remove(text, start)
        self._grow_again()

    def _grow_again(self) -> None:
        """Turn ends inside edges that no other suffix passes through into growing leaves."""
        ending: dict[int, list[tuple[int, OpenSequence]]] = {}
        for each in self._open:
            for node, depth in each.repeated:
                ending.setdefault(node, []).append((depth, each))
        for node, found in ending.items():
            if self._kids[node] or self._count[node] > len(found):
                continue
            depth, owner = max(found, key=lambda one: one[0])
            start = len(owner.text) - depth
            owner.repeated.remove((node, depth))
            owner.leaves = deque(sorted([*owner.leaves, (start, node)]), self.depth)
            self._text[node], self._from[node], self._end[node] = owner.text, start, self.depth

    def _remove(self, text: list[int], start: int) -> None:
        """Remove one suffix, and the nodes that no other suffix needs."""
        node, depth, last = _TOP, 0, min(self.depth, len(text) - start)
        path = []
        while depth < last:
            above, node = node, self._kids[node][text[start + depth]]
            self._count[node] -= 1
            if not self._count[node]:
                del self._kids[above][text[start + depth]]
            if self._best[above] == node:
                others = self._kids[above].values()
                self._best[above] = max(others, key=self._count.__getitem__, default=_NONE)
            depth = self._end[node]
            path.append(node)
        for node in reversed(path):
            if not self._count[node]:
                self._text[node], self._kids[node] = [], {}
                self._free.append(node)
                continue
            kids = list(self._kids[node].values())
            edge = self._edge(node)
            if len(kids) == 1 and self._count[kids[0]] == self._count[node]:
                # No other suffix branches off or ends here.
                (child,) = kids
                above = self._parent[node]
                self._parent[child], self._kids[above][edge[0]] = above, child
                if self._best[above] == node:
                    self._best[above] = child
                self._text[node], self._kids[node] = [], {}
                self._free.append(node)
                if not self._is_growing(child):
                    edge = edge + self._edge(child)
                    self._text[child], self._from[child] = edge, -self._begin[node]
                self._begin[child] = self._begin[node]
            elif self._text[node] is text:
                self._text[node], self._from[node] = edge, -self._begin[node]

    # ---- queries ---------------------------------------------------------------------------------

    def follow(self, positions: Sequence[TreePosition], token: int) -> list[TreePosition]:
        """Return the suffixes of a text that occur here after it grows by a token, longest first.

        Args:
            points: Suffixes that occurred before the token.
        """
        parent, begin, end = self._parent, self._begin, self._end
        on: list[TreePosition] = []
        for known, depth in (*positions, (_TOP, 0)):
            node = known
            while depth <= begin[node]:
                node = parent[node]
            if depth == end[node]:
                node = self._kids[node].get(token, _NONE)
            elif self._next(node, depth) != token:
                continue
            if node != _NONE and depth + 1 < self.depth:
                on.append((node, depth + 1))
        return on

    def find_sequence(self, point: TreePosition) -> int | None:
        """Return a closed sequence that contains a string, or None. It is the last one, unless that
        was evicted."""
        number = self._newest[self._resolve(*point)]
        return number if number in self._sequences else None

    def count(self, point: TreePosition) -> int:
        """Return the count of a string."""
        node = self._resolve(*point)
        return self._count_passing(node, point[1], self._find_stops())

    def find_path(self, point: TreePosition, n: int, least: float) -> Continuation:
        """Return the most frequent continuation of a string, token by token.

        Args:
            n: Maximum number of tokens.
            least: Minimum probability of the path. The probability of a token is its share of the
                continuations.
        """
        node, depth = self._resolve(*point), point[1]
        stops = self._find_stops()
        tokens: list[int] = []
        score, whole = 0.0, self._count_passing(node, depth, stops)
        while len(tokens) < n:
            node = self._best[node] if depth == self._end[node] else node
            token = _NONE if node == _NONE else self._next(node, depth)
            if token == _NONE:
                break
            depth += 1
            p = self._count_passing(node, depth, stops) / whole  # earlier shares cancel out
            if p < least:
                break
            tokens.append(token)
            score += p
        return tokens, list(range(-1, len(tokens) - 1)), score

    def find_tree(self, point: TreePosition, n: int, least: float, levels: int) -> Continuation:
        """Return the most likely continuations of a string, as a tree of at most n nodes and
        `levels` levels.

        See `path` for `least`.
        """
        stops = self._find_stops()
        tokens, parents, score = list[int](), list[int](), 0.0
        numbers, heap = count(), list[tuple[float, int, int, int, int, int]]()
        home = self._resolve(*point)
        whole = self._count_passing(home, point[1], stops)

        def offer(node: int, depth: int, parent: int, level: int) -> None:
            """Add the children of the draft node `parent` to the heap."""
            if level > levels:
                return
            ends = depth == self._end[node]
            for child in self._kids[node].values() if ends else (node,):
                worth = self._count_passing(child, depth + 1, stops) / whole
                if worth >= least and self._next(child, depth) != _NONE:
                    heappush(heap, (-worth, next(numbers), parent, child, depth + 1, level))

        offer(home, point[1], -1, 1)
        while heap and len(tokens) < n:
            worth, _, parent, node, depth, level = heappop(heap)
            tokens.append(self._next(node, depth - 1))
            parents.append(parent)
            score -= worth
            offer(node, depth, len(tokens) - 1, level + 1)
        return tokens, parents, score

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixTree:
        """Copy faster than the generic deepcopy does."""
        twin = SuffixTree(self.depth, self._eviction)
        twin._policy = copy.deepcopy(self._policy)
        opened = [each.text for each in self._open]
        texts = {id(text): text.copy() for text in (*self._sequences.values(), *opened)}
        twin.num_tokens, twin.evictions = self.num_tokens, self.evictions
        twin._sequences = {at: texts[id(text)] for at, text in self._sequences.items()}
        twin._number, twin._open = self._number, []
        for each in self._open:
            copied = twin.open()
            copied.text, copied.repeated = texts[id(each.text)], each.repeated.copy()
            copied.leaves = each.leaves.copy()
            if each is self._first:
                twin._first = copied
        twin._kids = [kids.copy() for kids in self._kids]
        # The texts of edges that outlived theirs are never written to.
        twin._text = [texts.get(id(text), text) for text in self._text]
        for name in ("_parent", "_begin", "_end", "_count", "_best", "_from", "_newest", "_free"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    # ---- nodes ----------------------------------------------------------------------------------

    def _resolve(self, node: int, depth: int) -> int:
        """Return the node on which a string ends, after later splits."""
        while depth <= self._begin[node]:
            node = self._parent[node]
        return node

    def _next(self, node: int, depth: int) -> int:
        """Return the token after the first `depth` tokens of a node's string, or `_NONE` at the end
        of an open text."""
        text, at = self._text[node], self._from[node] + depth
        return text[at] if at < len(text) and depth < self._end[node] else _NONE

    def _edge(self, node: int) -> list[int]:
        first = self._from[node]
        return self._text[node][first + self._begin[node] : first + self._end[node]]

    def _find_stops(self) -> dict[int, list[int]]:
        """Return the sorted lengths of open suffixes that end inside an edge, by node."""
        if self._stopped is None:
            self._stopped = {}
            for known, depth in (point for each in self._open for point in each.repeated):
                node = self._resolve(known, depth)
                if depth < self._end[node]:
                    self._stopped.setdefault(node, []).append(depth)
            for depths in self._stopped.values():
                depths.sort()
        return self._stopped

    def _count_passing(self, node: int, depth: int, stops: dict[int, list[int]]) -> int:
        """Return the count of the first `depth` tokens of a node's string, which end on its
        edge."""
        short = stops.get(node)
        return self._count[node] - (bisect_left(short, depth) if short else 0)

    def _enter(self, node: int, above: int) -> None:
        times = self._count[node] = self._count[node] + 1
        best = self._best[above]
        if best == _NONE or times > self._count[best]:
            self._best[above] = node

    def _add_node(self, parent: int, end: int, times: int, text: list[int], first: int) -> int:
        columns: Any = (
            (self._kids, {}), (self._parent, parent), (self._begin, self._end[parent]),
            (self._end, end), (self._count, times), (self._best, _NONE), (self._text, text),
            (self._from, first), (self._newest, _NONE),
        )  # fmt: skip
        if self._free:
            node = self._free.pop()
            for column, value in columns:
                column[node] = value
            return node
        for column, value in columns:
            column.append(value)
        return len(self._end) - 1

    def _is_exhausted(self, node: int, depth: int) -> bool:
        """Return True if the text of a node's edge has at most `depth` tokens so far."""
        return self._from[node] + depth >= len(self._text[node])

    def _is_growing(self, node: int) -> bool:
        """Return True if the edge of a node refers to the text of an open sequence."""
        return any(each.text is self._text[node] for each in self._open)

    def _count_ending(self, node: int, depth: int, beside: OpenSequence) -> int:
        """Return the number of suffixes of other open sequences that end inside a node's edge.

        Only suffixes of at most `depth` tokens count.
        """
        others = (each for each in self._open if each is not beside)
        points = (point for each in others for point in each.repeated if point[1] <= depth)
        return sum(self._resolve(*point) == node for point in points)

    def _end_in_leaf(self, leaf: int, depth: int) -> None:
        """Turn a growing leaf of an open sequence into a suffix that ends at `depth` tokens."""
        owner = next(each for each in self._open if each.text is self._text[leaf])
        owner.leaves.remove((self._from[leaf], leaf))
        insort(owner.repeated, (leaf, depth), key=lambda point: -point[1])

    def _add_leaf(self, grown: OpenSequence, parent: int, token: int, start: int) -> None:
        """Add a child for the suffix that starts at `start`. It grows with the text."""
        leaf = self._add_node(parent, self.depth, 0, grown.text, start)
        self._kids[parent][token] = leaf
        grown.leaves.append((start, leaf))
        self._enter(leaf, parent)

    def _split(self, node: int, depth: int, short: int) -> int:
        """Split a node's edge after `depth` tokens, and return the upper half, which is a new node.

        Args:
            short: Number of its strings that end in the upper half.
        """
        above, text, first = self._parent[node], self._text[node], self._from[node]
        upper = self._add_node(above, depth, self._count[node], text, first)
        self._kids[above][text[first + self._begin[node]]] = upper
        if self._best[above] == node:
            self._best[above] = upper
        self._kids[upper][text[first + depth]] = self._best[upper] = node
        self._parent[node], self._begin[node] = upper, depth
        self._count[node] -= short
        self._newest[upper] = self._newest[node]
        return upper
