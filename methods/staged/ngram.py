"""A Katz back-off n-gram model over token ids, counted while it is used.

Slava Katz: Estimation of Probabilities from Sparse Data for the Language Model Component of a
Speech Recognizer, IEEE Transactions on Acoustics, Speech and Signal Processing, 1987: what was seen
after a context is discounted, and what that frees is shared out as the next shorter context says.
The discount is absolute, the same for every count (Ney, Essen and Kneser, Computer Speech and
Language, 1994), as counts of a few hundred tokens are too few for Good-Turing's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any

Context = tuple[int, ...]
Ranked = Iterator[tuple[int, float]]
"""Tokens with their probabilities, likeliest first."""


class Continuations:
    """What followed one context.

    Attributes:
        total: how often anything did.
        of: how often each token did.
        ranked: (-count, token), so that the most frequent come first, of these the lowest id.
    """

    __slots__ = ("of", "ranked", "total")

    def __init__(self) -> None:
        self.total = 0
        self.of: dict[int, int] = {}
        self.ranked: list[tuple[int, int]] = []

    def add(self, token: int) -> None:
        """Count one more."""
        times = self.of.get(token, 0)
        if times:
            del self.ranked[bisect_left(self.ranked, (-times, token))]
        insort(self.ranked, (-times - 1, token))
        self.of[token] = times + 1
        self.total += 1

    def copy(self) -> Continuations:
        """The same counts, to go on from by themselves."""
        twin = Continuations()
        twin.total, twin.of, twin.ranked = self.total, self.of.copy(), self.ranked.copy()
        return twin


class KatzModel:
    """P(token | context): with c of N counts, (c - d) / N where c > 0, else a share of the rest.

    That rest, d times the number of different tokens seen, over N, goes to the tokens not seen, in
    proportion to their probabilities after the context without its first token; after the empty
    context all tokens not seen are alike. A context that was never seen counts as the next shorter
    one. Where every token of the vocabulary was seen, nothing is discounted. The probabilities sum
    to 1 after every context.

    Args:
        vocab_size: number of token ids.
        order: longest n-gram counted: 3 looks two tokens back.
        discount: d, above 0 and below 1.
    """

    def __init__(self, vocab_size: int, order: int = 3, discount: float = 0.5) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self.discount = discount
        self._after: dict[Context, Continuations] = {}

    def add(self, context: Sequence[int], token: int) -> None:
        """Count a token after the end of a context of any length."""
        tail = self._tail(context)
        for first in range(len(tail) + 1):
            after = self._after.get(tail[first:])
            if after is None:
                after = self._after[tail[first:]] = Continuations()
            after.add(token)

    def distribution(self, context: Sequence[int]) -> list[float]:
        """The probability of every token after a context."""
        distribution = [1 / self.vocab_size] * self.vocab_size
        tail = self._tail(context)
        for first in range(len(tail), -1, -1):
            after = self._after.get(tail[first:])
            if after is None:
                break  # nor was a longer one seen
            d = self._discount(after)
            unseen = sum(p for token, p in enumerate(distribution) if token not in after.of)
            share = d * len(after.of) / after.total / unseen if unseen else 0.0
            distribution = [p * share for p in distribution]
            for token, times in after.of.items():
                distribution[token] = (times - d) / after.total
        return distribution

    def top(self, context: Sequence[int], k: int) -> list[tuple[int, float]]:
        """The k likeliest tokens after a context, with their probabilities; see `ranked`."""
        return list(islice(self.ranked(context), k))

    def ranked(self, context: Sequence[int]) -> Ranked:
        """All tokens after a context; use it before the next `add`.

        Of tokens that are alike those seen come first, then lower ids. Looks no further down than
        it is asked to: mostly into the counts of the longest context alone.
        """
        return self._ranked(self._tail(context))

    def tree(
        self, context: Sequence[int], nodes: int, depth: int, least: float = 0.0
    ) -> tuple[list[int], tuple[int, ...]]:
        """The likeliest continuations of a context, as a tree of at most `depth` levels.

        Args:
            nodes: most nodes; those are taken whose paths are likeliest.
            least: probability below which a path is left out.
        Returns:
            (tokens, parents): parents before their children, -1 for the context's end.
        """
        tokens: list[int] = []
        parents: list[int] = []
        # (-probability of the path, number, parent, token; the parent's probability, its context,
        # its further children, level): no node is likelier than its parent or the sibling before
        # it, so the next best one is always in the heap.
        heap: list[tuple[float, int, int, int, float, Context, Ranked, int]] = []
        numbers = count()

        def offer(parent: int, above: float, after: Context, children: Ranked, level: int) -> None:
            token, p = next(children, (-1, 0.0))
            if level <= depth and above * p > least:
                entry = (-above * p, next(numbers), parent, token, above, after, children, level)
                heappush(heap, entry)

        tail = self._tail(context)
        offer(-1, 1.0, tail, self._ranked(tail), 1)
        while heap and len(tokens) < nodes:
            value, _, parent, token, above, after, children, level = heappop(heap)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            offer(parent, above, after, children, level)
            tail = self._tail((*after, token))
            offer(node, -value, tail, self._ranked(tail), level + 1)
        return tokens, tuple(parents)

    def __deepcopy__(self, memo: dict[int, Any]) -> KatzModel:
        """Counts of many contexts are copied often, and nothing in them needs the general way."""
        twin = KatzModel(self.vocab_size, self.order, self.discount)
        twin._after = {context: after.copy() for context, after in self._after.items()}
        return twin

    def _tail(self, context: Sequence[int]) -> Context:
        return tuple(context[max(0, len(context) - self.order + 1) :])

    def _discount(self, after: Continuations) -> float:
        return self.discount if len(after.of) < self.vocab_size else 0.0

    def _ranked(self, context: Context) -> Ranked:
        """All tokens after a context of at most order - 1 tokens."""
        after = self._after.get(context)
        if after is None:
            yield from self._shorter(context)
            return
        d = self._discount(after)
        most = d * len(after.of)  # what all unseen tokens share, in counts
        unseen: Ranked | None = None
        best: tuple[int, float] | None = None
        for negative, token in after.ranked:
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

    def _unseen(self, context: Context, after: Continuations) -> Ranked:
        """The tokens that did not follow a context, with their shares of what was discounted."""
        if len(after.of) == self.vocab_size:
            return
        if context:  # what was seen after it was seen after its end, too: `add` counts both
            shorter = self._after[context[1:]]
            d = self._discount(shorter)
            seen = sum(shorter.of[token] - d for token in after.of) / shorter.total
        else:
            seen = len(after.of) / self.vocab_size
        share = self._discount(after) * len(after.of) / after.total / (1 - seen)
        for token, p in self._shorter(context):
            if token not in after.of:
                yield token, p * share

    def _shorter(self, context: Context) -> Ranked:
        """All tokens as the next shorter context says; without any context all are alike."""
        if context:
            return self._ranked(context[1:])
        return ((token, 1 / self.vocab_size) for token in range(self.vocab_size))
