"""Katz back-off n-gram model over token ids. It collects its counts during decoding.

Slava Katz: Estimation of Probabilities from Sparse Data for the Language Model Component of a
Speech Recognizer, IEEE Transactions on Acoustics, Speech and Signal Processing, 1987. The counts of
the tokens after a context are discounted. Unseen tokens share the freed probability, in proportion
to their probabilities after a shorter context.

The discount is absolute, which means the same number for every count (Ney, Essen and Kneser,
Computer Speech and Language, 1994). Katz's Good-Turing discount needs more than the few hundred
tokens of an output.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any

Context = tuple[int, ...]
RankedTokens = Iterator[tuple[int, float]]
"""Tokens with their probabilities, the most likely first."""


class Continuations:
    """Counts of the tokens that followed one context.

    Attributes:
        total: Sum of all counts.
        counts: Map from each token that followed to its count.
        by_count: Sorted list of (-count, token). The most frequent token comes first. Among equally
            frequent tokens, the lower id comes first.
    """

    __slots__ = ("by_count", "counts", "total")

    def __init__(self) -> None:
        self.total = 0
        self.counts: dict[int, int] = {}
        self.by_count: list[tuple[int, int]] = []

    def add(self, token: int) -> None:
        """Add one to the count of a token."""
        times = self.counts.get(token, 0)
        if times:
            del self.by_count[bisect_left(self.by_count, (-times, token))]
        insort(self.by_count, (-times - 1, token))
        self.counts[token] = times + 1
        self.total += 1

    def copy(self) -> Continuations:
        """Return an independent copy."""
        twin = Continuations()
        twin.total, twin.counts, twin.by_count = (
            self.total,
            self.counts.copy(),
            self.by_count.copy(),
        )
        return twin


class KatzModel:
    """Katz model of P(token | context).

    Let N be the sum of the counts after a context, and d the discount. A token with count c has
    probability (c - d) / N. Unseen tokens share the remaining probability, in proportion to their
    probabilities after the context without its first token. After the empty context all unseen
    tokens are equally likely. If a context has no counts, the context without its first token is
    used. If every token of the vocabulary was seen after a context, nothing is discounted.

    Args:
        vocab_size: Number of token ids.
        order: Maximum length of an n-gram. With 3, a context has at most two tokens.
        discount: Discount d, between 0 and 1.
    """

    def __init__(self, vocab_size: int, order: int = 3, discount: float = 0.5) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self.discount = discount
        self._after: dict[Context, Continuations] = {}

    def add(self, context: Sequence[int], token: int) -> None:
        """Count a token after a context of any length."""
        tail = self._tail(context)
        for first in range(len(tail) + 1):
            after = self._after.get(tail[first:])
            if after is None:
                after = self._after[tail[first:]] = Continuations()
            after.add(token)

    def distribution(self, context: Sequence[int]) -> list[float]:
        """Return the probability of every token after a context."""
        distribution = [1 / self.vocab_size] * self.vocab_size
        tail = self._tail(context)
        for first in range(len(tail), -1, -1):
            after = self._after.get(tail[first:])
            if after is None:
                break  # a longer context was not seen either
            d = self._discount(after)
            unseen = sum(p for token, p in enumerate(distribution) if token not in after.counts)
            share = d * len(after.counts) / after.total / unseen if unseen else 0.0
            distribution = [p * share for p in distribution]
            for token, times in after.counts.items():
                distribution[token] = (times - d) / after.total
        return distribution

    def top(self, context: Sequence[int], k: int) -> list[tuple[int, float]]:
        """Return the k most likely tokens after a context, as pairs (token, probability)."""
        return list(islice(self.rank_tokens(context), k))

    def rank_tokens(self, context: Sequence[int]) -> RankedTokens:
        """Yield all tokens after a context, the most likely first. An item is (token, probability).

        Among equally likely tokens, seen tokens come before unseen tokens, and lower ids come
        first. The iterator is lazy. It is invalid after the next `add`.
        """
        return self._rank_tokens(self._tail(context))

    def tree(
        self, context: Sequence[int], nodes: int, depth: int, least: float = 0.0
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the most likely continuations of a context, as a tree of at most `depth` levels.

        Args:
            context: Tokens before the tree.
            nodes: Maximum number of nodes. The nodes with the most likely paths are chosen.
            depth: Maximum number of levels.
            least: Minimum probability of a path.

        Returns:
            (tokens, parents). Parents come before their children. Parent -1 is the end of the
            context.
        """
        tokens: list[int] = []
        parents: list[int] = []
        # An entry of the heap is a possible node: (-probability of its path, number, parent, token,
        # probability of the parent's path, context of the parent, further children of the parent,
        # level). A node is never more likely than its parent or its previous sibling, so the heap
        # always contains the next best node.
        heap: list[tuple[float, int, int, int, float, Context, RankedTokens, int]] = []
        numbers = count()

        def offer(
            parent: int, above: float, after: Context, children: RankedTokens, level: int
        ) -> None:
            token, p = next(children, (-1, 0.0))
            if level <= depth and above * p > least:
                entry = (-above * p, next(numbers), parent, token, above, after, children, level)
                heappush(heap, entry)

        tail = self._tail(context)
        offer(-1, 1.0, tail, self._rank_tokens(tail), 1)
        while heap and len(tokens) < nodes:
            value, _, parent, token, above, after, children, level = heappop(heap)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            offer(parent, above, after, children, level)
            tail = self._tail((*after, token))
            offer(node, -value, tail, self._rank_tokens(tail), level + 1)
        return tokens, tuple(parents)

    def __deepcopy__(self, memo: dict[int, Any]) -> KatzModel:
        """Return a copy. The generic deepcopy is slower."""
        twin = KatzModel(self.vocab_size, self.order, self.discount)
        twin._after = {context: after.copy() for context, after in self._after.items()}
        return twin

    def _tail(self, context: Sequence[int]) -> Context:
        return tuple(context[max(0, len(context) - self.order + 1) :])

    def _discount(self, after: Continuations) -> float:
        return self.discount if len(after.counts) < self.vocab_size else 0.0

    def _rank_tokens(self, context: Context) -> RankedTokens:
        """Yield all tokens after a context that has less than `order` tokens, the most likely
        first.
        """
        after = self._after.get(context)
        if after is None:
            yield from self._shorter(context)
            return
        d = self._discount(after)
        most = d * len(after.counts)  # total probability of unseen tokens, multiplied by N
        unseen: RankedTokens | None = None
        best: tuple[int, float] | None = None
        for negative, token in after.by_count:
            left = -negative - d
            if unseen is None and left < most:
                unseen = self._unseen(context, after)
                best = next(unseen, None)
            p = left / after.total
            while unseen is not None and best is not None and best[1] > p:
                yield best
                best = next(unseen, None)
            yield token, p
        if unseen is None:
            unseen = self._unseen(context, after)
        elif best is not None:
            yield best
        yield from unseen

    def _unseen(self, context: Context, after: Continuations) -> RankedTokens:
        """Yield the tokens that did not follow a context, the most likely first."""
        if len(after.counts) == self.vocab_size:
            return
        if context:  # `add` counts every suffix, so the shorter context has these counts too
            shorter = self._after[context[1:]]
            d = self._discount(shorter)
            seen = sum(shorter.counts[token] - d for token in after.counts) / shorter.total
        else:
            seen = len(after.counts) / self.vocab_size
        share = self._discount(after) * len(after.counts) / after.total / (1 - seen)
        for token, p in self._shorter(context):
            if token not in after.counts:
                yield token, p * share

    def _shorter(self, context: Context) -> RankedTokens:
        """Yield all tokens after the context without its first token.

        For the empty context all tokens are equally likely.
        """
        if context:
            return self._rank_tokens(context[1:])
        return ((token, 1 / self.vocab_size) for token in range(self.vocab_size))
