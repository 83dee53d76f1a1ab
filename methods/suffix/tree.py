"""Suffix tree of SuffixDecoding.

It counts how often each string of tokens occurs in a set of sequences.

The tree is a compressed trie of all suffixes (Peter Weiner: Linear Pattern Matching Algorithms,
SWAT 1973). As in SuffixDecoding (Oliaro et al., NeurIPS 2025, arXiv:2411.04975), it stores counts
and has a maximum depth. Tokens are added one at a time, and whole sequences can be removed.

A node represents a string: the tokens on the path from the root to the node. The edge above a node
contains all tokens since its parent. An edge is stored as a position in a text, not as a copy.
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

StringPosition = tuple[int, int]
"""Position of a string in the tree: (node, length). The string ends on the edge above the node, or
at the node itself.

A later split may move the string to a new node above. Methods of `SuffixTree` handle this.
"""

Continuation = tuple[list[int], list[int], float]
"""Continuations of a string, as a tree: (tokens, parents, score). Parents are as in `Draft`.

The score is the expected number of accepted tokens. It is the sum of the probabilities of the paths
to all tokens.
"""

_ROOT, _NONE = 0, -1


class OpenSequence:
    """Sequence of a `SuffixTree` to which tokens can still be added.

    Attributes:
        text: Tokens of the sequence.
        repeated: Suffixes of the text that also occur elsewhere in the tree, longest first.
        leaves: Suffixes that occur nowhere else, as (start in the text, node). The node is a leaf,
            whose edge grows with the text. Suffixes with the maximum length are complete and not
            listed.
    """

    def __init__(self, depth: int) -> None:
        self.text: list[int] = []
        self.repeated: list[StringPosition] = []
        self.leaves: deque[tuple[int, int]] = deque(maxlen=depth)


class SuffixTree:
    """Suffix tree over all strings of at most `depth` tokens in a set of sequences, with their
    counts.

    `append` adds a token to an open sequence, and `close` ends the sequence. The tree always has a
    default open sequence. `open` starts an additional open sequence, for texts that grow at the
    same time. Overlapping occurrences of a string all count.

    `append` takes one operation for each suffix of the text that occurs elsewhere. Other suffixes
    are leaves and need no operation. The tree has at most 2 nodes per token, and `depth` more nodes
    per closed sequence.

    Args:
        depth: Maximum length of a string, in tokens.
        eviction: Name of the eviction policy. The pages of the policy are the closed sequences.
            `close` and `use` count as requests of a sequence.

    Attributes:
        num_tokens: Number of tokens of all sequences.
        evictions: Number of evicted sequences. A `StringPosition` from before an eviction is
            invalid.
    """

    def __init__(self, depth: int, eviction: EvictionName = "fifo") -> None:
        self.depth, self._eviction = depth, eviction
        self._policy = POLICIES[eviction]()
        self.num_tokens = self.evictions = 0
        self._sequences: dict[int, list[int]] = {}  # closed sequences, by number
        self._number = 0
        self._open: list[OpenSequence] = []
        self._default = self.open()
        # Each of these lists has one entry per node of the tree.
        self._children: list[dict[int, int]] = [{}]  # by the first token of the child's edge
        self._parent = [_NONE]
        self._start_depth = [-1]  # length of the node's string, without its edge
        self._end_depth = [0]  # length of the node's string
        self._counts = [0]
        self._best_child = [_NONE]  # the most frequent child
        self._texts = [list[int]()]  # a text that contains the node's string ...
        self._text_start = [0]  # ... from this index on
        self._last_sequence = [_NONE]  # number of the last closed sequence with this string
        self._free: list[int] = []  # unused nodes
        self._stop_cache: dict[int, list[int]] | None = None  # cache of `_find_stops`

    # ---- adding and removing ---------------------------------------------------------------------

    @property
    def repeated(self) -> list[StringPosition]:
        """Suffixes of the default open sequence that also occur elsewhere in the tree, longest
        first.
        """
        return self._default.repeated

    def open(self) -> OpenSequence:
        """Return a new open sequence."""
        self._open.append(OpenSequence(self.depth))
        return self._open[-1]

    def append(self, token: int, sequence: OpenSequence | None = None) -> None:
        """Add a token to an open sequence. With None, add it to the default open sequence."""
        grown = sequence or self._default
        text = grown.text
        place = len(text)
        text.append(token)
        self.num_tokens += 1
        self._stop_cache = None
        parent, start_depth, end_depth, children = (
            self._parent,
            self._start_depth,
            self._end_depth,
            self._children,
        )
        ends: list[StringPosition] = []
        suffixes = [*grown.repeated, (_ROOT, 0)]
        for number, (old_node, depth) in enumerate(suffixes):
            node = old_node
            while depth <= start_depth[node]:  # a split moved the string to a node above
                node = parent[node]
            if depth == end_depth[node]:
                child = children[node].get(token)
                if child is None:
                    self._add_leaf(grown, node, token, place - depth)
                    continue
                self._add_occurrence(child, node)
                node = child
            elif self._is_exhausted(node, depth):
                # This edge is a leaf of another open sequence, whose text ends here. The suffix of
                # that sequence is now repeated. The leaf belongs to this text from now on.
                self._end_leaf(node, depth)
                self._texts[node], self._text_start[node] = text, place - depth
                grown.leaves.append((place - depth, node))
                continue
            elif self._texts[node][self._text_start[node] + depth] != token:
                # The edge continues with another token, so it is split here. Count the suffixes
                # that end on the upper half of the edge. They do not belong to the lower half.
                num_shorter = sum(self._resolve(*shorter) == node for shorter in suffixes[number:])
                num_shorter += self._count_ending(node, depth, excluded=grown)
                self._add_leaf(grown, self._split(node, depth, num_shorter), token, place - depth)
                continue
            if depth + 1 < self.depth:
                ends.append((node, depth + 1))
        grown.repeated = ends

    def close(self, sequence: OpenSequence | None = None) -> None:
        """End an open sequence. With None, end the default open sequence and start a new one."""
        ended = sequence or self._default
        text = ended.text
        if text:
            self._close(ended)
            self._sequences[self._number] = text
            self._policy.request(self._number)
            self._number += 1
        self._open.remove(ended)
        if ended is self._default:
            self._default = self.open()

    def _close(self, ended: OpenSequence) -> None:
        """Insert nodes so that every suffix of the sequence ends at a node."""
        text = ended.text
        self._stop_cache = None
        for start, node in ended.leaves:
            self._end_depth[node] = min(self._end_depth[node], len(text) - start)
        for old_node, depth in reversed(ended.repeated):
            node = self._resolve(old_node, depth)
            if depth < self._end_depth[node]:
                if self._is_exhausted(node, depth):  # a leaf of another open sequence, as in append
                    self._end_leaf(node, depth)
                    self._end_depth[node] = depth
                else:
                    self._split(node, depth, 1 + self._count_ending(node, depth, excluded=ended))
        ended.leaves.clear()
        ended.repeated = []
        for start in range(len(text)):
            node, depth, last = _ROOT, 0, min(self.depth, len(text) - start)
            while depth < last:
                node = self._children[node][text[start + depth]]
                self._last_sequence[node], depth = self._number, self._end_depth[node]

    def use(self, number: int | None) -> None:
        """Tell the eviction policy that a draft from this sequence was accepted.

        The call has no effect if `number` is None or if the sequence was evicted.
        """
        if number in self._sequences:
            self._policy.request(number)

    def evict(self, max_tokens: int) -> None:
        """Evict closed sequences until at most `max_tokens` tokens remain.

        The policy chooses the sequences.
        """
        for each in self._open:  # `_remove` may free the node of a position that was not resolved
            each.repeated = [(self._resolve(*position), position[1]) for position in each.repeated]
        while self.num_tokens > max_tokens and self._sequences:
            text = self._sequences.pop(self._policy.evict())
            self.evictions += 1
            self._stop_cache = None
            self.num_tokens -= len(text)
            for start in range(len(text)):
                self._remove(text, start)
        self._restore_leaves()

    def _restore_leaves(self) -> None:
        """After an eviction, turn repeated suffixes that occur nowhere else any more into
        leaves.
        """
        ending: dict[int, list[tuple[int, OpenSequence]]] = {}
        for each in self._open:
            for node, depth in each.repeated:
                ending.setdefault(node, []).append((depth, each))
        for node, found in ending.items():
            if self._children[node] or self._counts[node] > len(found):
                continue
            depth, owner = max(found, key=lambda one: one[0])
            start = len(owner.text) - depth
            owner.repeated.remove((node, depth))
            owner.leaves = deque(sorted([*owner.leaves, (start, node)]), self.depth)
            self._texts[node], self._text_start[node], self._end_depth[node] = (
                owner.text,
                start,
                self.depth,
            )

    def _remove(self, text: list[int], start: int) -> None:
        """Remove one suffix of a sequence, and the nodes that no other suffix needs."""
        node, depth, last = _ROOT, 0, min(self.depth, len(text) - start)
        path = []
        while depth < last:
            above, node = node, self._children[node][text[start + depth]]
            self._counts[node] -= 1
            if not self._counts[node]:
                del self._children[above][text[start + depth]]
            if self._best_child[above] == node:
                others = self._children[above].values()
                self._best_child[above] = max(others, key=self._counts.__getitem__, default=_NONE)
            depth = self._end_depth[node]
            path.append(node)
        for node in reversed(path):
            if not self._counts[node]:
                self._texts[node], self._children[node] = [], {}
                self._free.append(node)
                continue
            children = list(self._children[node].values())
            edge = self._edge(node)
            if len(children) == 1 and self._counts[children[0]] == self._counts[node]:
                # Every occurrence continues with the same child, so merge this node into the child.
                (child,) = children
                above = self._parent[node]
                self._parent[child], self._children[above][edge[0]] = above, child
                if self._best_child[above] == node:
                    self._best_child[above] = child
                self._texts[node], self._children[node] = [], {}
                self._free.append(node)
                if not self._is_growing(child):
                    edge = edge + self._edge(child)
                    self._texts[child], self._text_start[child] = edge, -self._start_depth[node]
                self._start_depth[child] = self._start_depth[node]
            elif self._texts[node] is text:
                self._texts[node], self._text_start[node] = edge, -self._start_depth[node]

    # ---- queries ---------------------------------------------------------------------------------

    def follow(self, positions: Sequence[StringPosition], token: int) -> list[StringPosition]:
        """Extend matches by one token.

        Return the suffixes of the text that occur in the tree, longest first.

        Args:
            positions: The result for the text without its last token.
            token: The last token of the text.
        """
        parent, start_depth, end_depth = self._parent, self._start_depth, self._end_depth
        on: list[StringPosition] = []
        for old_node, depth in (*positions, (_ROOT, 0)):
            node = old_node
            while depth <= start_depth[node]:
                node = parent[node]
            if depth == end_depth[node]:
                node = self._children[node].get(token, _NONE)
            elif self._next(node, depth) != token:
                continue
            if node != _NONE and depth + 1 < self.depth:
                on.append((node, depth + 1))
        return on

    def find_sequence(self, position: StringPosition) -> int | None:
        """Return the number of the newest closed sequence that contains the string.

        Return None if no closed sequence contains it, or if the sequence was evicted.
        """
        number = self._last_sequence[self._resolve(*position)]
        return number if number in self._sequences else None

    def count(self, position: StringPosition) -> int:
        """Return the number of occurrences of a string."""
        node = self._resolve(*position)
        return self._count_passing(node, position[1], self._find_stops())

    def find_path(self, position: StringPosition, n: int, least: float) -> Continuation:
        """Return one continuation of a string. It takes the most frequent next token at each step.

        Args:
            position: The string.
            n: Maximum number of tokens.
            least: Minimum probability of the path to a token. The probability is the count of
                string plus path, divided by the count of the string.
        """
        node, depth = self._resolve(*position), position[1]
        stops = self._find_stops()
        tokens: list[int] = []
        score, whole = 0.0, self._count_passing(node, depth, stops)
        while len(tokens) < n:
            node = self._best_child[node] if depth == self._end_depth[node] else node
            token = _NONE if node == _NONE else self._next(node, depth)
            if token == _NONE:
                break
            depth += 1
            p = self._count_passing(node, depth, stops) / whole
            if p < least:
                break
            tokens.append(token)
            score += p
        return tokens, list(range(-1, len(tokens) - 1)), score

    def find_tree(
        self, position: StringPosition, n: int, least: float, levels: int
    ) -> Continuation:
        """Return the most likely continuations of a string, as a tree.

        Args:
            position: The string.
            n: Maximum number of nodes.
            least: Minimum probability of the path to a node, given the string.
            levels: Maximum number of levels.
        """
        stops = self._find_stops()
        tokens, parents, score = list[int](), list[int](), 0.0
        numbers, heap = count(), list[tuple[float, int, int, int, int, int]]()
        home = self._resolve(*position)
        whole = self._count_passing(home, position[1], stops)

        def offer(node: int, depth: int, parent: int, level: int) -> None:
            """Add the continuations of a string to the heap, as children of a draft node."""
            if level > levels:
                return
            ends = depth == self._end_depth[node]
            for child in self._children[node].values() if ends else (node,):
                worth = self._count_passing(child, depth + 1, stops) / whole
                if worth >= least and self._next(child, depth) != _NONE:
                    heappush(heap, (-worth, next(numbers), parent, child, depth + 1, level))

        offer(home, position[1], -1, 1)
        while heap and len(tokens) < n:
            worth, _, parent, node, depth, level = heappop(heap)
            tokens.append(self._next(node, depth - 1))
            parents.append(parent)
            score -= worth
            offer(node, depth, len(tokens) - 1, level + 1)
        return tokens, parents, score

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixTree:
        """Return a copy. The generic deepcopy is slower."""
        new = SuffixTree(self.depth, self._eviction)
        new._policy = copy.deepcopy(self._policy)
        opened = [each.text for each in self._open]
        texts = {id(text): text.copy() for text in (*self._sequences.values(), *opened)}
        new.num_tokens, new.evictions = self.num_tokens, self.evictions
        new._sequences = {at: texts[id(text)] for at, text in self._sequences.items()}
        new._number, new._open = self._number, []
        for each in self._open:
            copied = new.open()
            copied.text, copied.repeated = texts[id(each.text)], each.repeated.copy()
            copied.leaves = each.leaves.copy()
            if each is self._default:
                new._default = copied
        new._children = [children.copy() for children in self._children]
        # Other texts belong to evicted sequences. They never change, so both copies of the tree may
        # share them.
        new._texts = [texts.get(id(text), text) for text in self._texts]
        for name in (
            "_parent",
            "_start_depth",
            "_end_depth",
            "_counts",
            "_best_child",
            "_text_start",
            "_last_sequence",
            "_free",
        ):
            setattr(new, name, getattr(self, name).copy())
        return new

    # ---- nodes ----------------------------------------------------------------------------------

    def _resolve(self, node: int, depth: int) -> int:
        """Return the node of a string of `depth` tokens.

        The string was at (node, depth) before. An edge may have been split since then.
        """
        while depth <= self._start_depth[node]:
            node = self._parent[node]
        return node

    def _next(self, node: int, depth: int) -> int:
        """Return the token after the first `depth` tokens of a node's string, or `_NONE` at its
        end.
        """
        text, at = self._texts[node], self._text_start[node] + depth
        return text[at] if at < len(text) and depth < self._end_depth[node] else _NONE

    def _edge(self, node: int) -> list[int]:
        first = self._text_start[node]
        return self._texts[node][first + self._start_depth[node] : first + self._end_depth[node]]

    def _find_stops(self) -> dict[int, list[int]]:
        """Return the repeated suffixes that end inside an edge.

        The key is the node below the edge. The value is the sorted list of the suffix lengths.
        """
        if self._stop_cache is None:
            self._stop_cache = {}
            for old_node, depth in (position for each in self._open for position in each.repeated):
                node = self._resolve(old_node, depth)
                if depth < self._end_depth[node]:
                    self._stop_cache.setdefault(node, []).append(depth)
            for depths in self._stop_cache.values():
                depths.sort()
        return self._stop_cache

    def _count_passing(self, node: int, depth: int, stops: dict[int, list[int]]) -> int:
        """Return how often the string at (node, depth) occurs.

        The count of the node includes suffixes that end earlier on its edge, so they are
        subtracted.
        """
        num_shorter = stops.get(node)
        return self._counts[node] - (bisect_left(num_shorter, depth) if num_shorter else 0)

    def _add_occurrence(self, node: int, above: int) -> None:
        times = self._counts[node] = self._counts[node] + 1
        best = self._best_child[above]
        if best == _NONE or times > self._counts[best]:
            self._best_child[above] = node

    def _add_node(
        self, parent: int, end_depth: int, times: int, text: list[int], first: int
    ) -> int:
        columns: Any = (
            (self._children, {}),
            (self._parent, parent),
            (self._start_depth, self._end_depth[parent]),
            (self._end_depth, end_depth),
            (self._counts, times),
            (self._best_child, _NONE),
            (self._texts, text),
            (self._text_start, first),
            (self._last_sequence, _NONE),
        )
        if self._free:
            node = self._free.pop()
            for column, value in columns:
                column[node] = value
            return node
        for column, value in columns:
            column.append(value)
        return len(self._end_depth) - 1

    def _is_exhausted(self, node: int, depth: int) -> bool:
        """Return True if the growing edge ends after the first `depth` tokens of its string."""
        return self._text_start[node] + depth >= len(self._texts[node])

    def _is_growing(self, node: int) -> bool:
        """Return True if the edge of the node grows, because it belongs to an open sequence."""
        return any(each.text is self._texts[node] for each in self._open)

    def _count_ending(self, node: int, depth: int, excluded: OpenSequence) -> int:
        """Return how many repeated suffixes of at most `depth` tokens end on a node's edge.

        Suffixes of the sequence `excluded` do not count.
        """
        others = (each for each in self._open if each is not excluded)
        positions = (
            position for each in others for position in each.repeated if position[1] <= depth
        )
        return sum(self._resolve(*position) == node for position in positions)

    def _end_leaf(self, leaf: int, depth: int) -> None:
        """Turn a leaf of an open sequence into a repeated suffix of `depth` tokens."""
        owner = next(each for each in self._open if each.text is self._texts[leaf])
        owner.leaves.remove((self._text_start[leaf], leaf))
        insort(owner.repeated, (leaf, depth), key=lambda position: -position[1])

    def _add_leaf(self, grown: OpenSequence, parent: int, token: int, start: int) -> None:
        """Add a leaf for the suffix of a sequence that starts at index `start` of its text."""
        leaf = self._add_node(parent, self.depth, 0, grown.text, start)
        self._children[parent][token] = leaf
        grown.leaves.append((start, leaf))
        self._add_occurrence(leaf, parent)

    def _split(self, node: int, depth: int, num_shorter: int) -> int:
        """Split the edge of a node after `depth` tokens.

        Return the new node, which is the upper half.

        Args:
            node: Node below the edge.
            depth: Number of tokens from the root to the split.
            num_shorter: Number of suffixes that end on the upper half of the edge.
        """
        above, text, first = self._parent[node], self._texts[node], self._text_start[node]
        upper = self._add_node(above, depth, self._counts[node], text, first)
        self._children[above][text[first + self._start_depth[node]]] = upper
        if self._best_child[above] == node:
            self._best_child[above] = upper
        self._children[upper][text[first + depth]] = self._best_child[upper] = node
        self._parent[node], self._start_depth[node] = upper, depth
        self._counts[node] -= num_shorter
        self._last_sequence[upper] = self._last_sequence[node]
        return upper
