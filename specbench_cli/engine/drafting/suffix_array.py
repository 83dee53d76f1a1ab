"""Suffix array over fixed texts, which finds all occurrences of a sequence of tokens.

Udi Manber, Gene Myers: Suffix Arrays: A New Method for On-Line String Searches, SIAM Journal on
Computing, 1993. The library libdivsufsort sorts the suffixes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_cli.former_names import renamed_members

Ints = NDArray[Any]


@renamed_members(behind="continuations")
class SuffixArray:
    """All positions of some texts, sorted by the suffixes that start at these positions.

    The occurrences of a string are neighbours in this order, so two binary searches find all of
    them. The tokens that follow each occurrence are sorted too.

    Args:
        tokens: Integers [n]: the concatenated texts. Each text ends with the marker `end`. The
            marker is not a token, so no string continues into the next text.
        order: Integers [n]: the positions 0 to n - 1, sorted by their suffixes.

    Attributes:
        end: The end marker, which is the last element of `tokens`.
    """

    def __init__(self, tokens: Ints, order: Ints) -> None:
        self.tokens, self.order = tokens, order
        self.end = int(tokens[-1])

    @staticmethod
    def sort(texts: Iterable[Sequence[int]], end: int) -> tuple[Ints, Ints]:
        """Sort the suffixes of some texts. Return the arguments `tokens` and `order` of the class.

        Tokens are stored as uint16 if they fit, otherwise as int32. The order is stored as int32,
        or as int64 for more than 2^31 tokens.

        Args:
            end: End marker, greater than each token. If there are no texts, `tokens` contains only
                this marker.
        """
        # Import the library only here: it starts a thread runtime, and only sorting needs it.
        from pydivsufsort import divsufsort

        fitting = np.uint16 if end <= np.iinfo(np.uint16).max else np.int32
        parts = [np.asarray([*text, end], dtype=fitting) for text in texts]
        tokens = np.concatenate(parts or [np.asarray([end], dtype=fitting)])
        return tokens, divsufsort(tokens)

    def find(self, string: Sequence[int]) -> range:
        """Return the range of indices in `order` where a string occurs. Empty if it
        does not occur."""
        wanted, n = list(string), len(string)

        def tokens_at(place: int) -> list[int]:
            found: list[int] = self.tokens[place : place + n].tolist()
            return found

        order: Any = self.order
        first = bisect_left(order, wanted, key=tokens_at)
        return range(first, bisect_right(order, wanted, first, key=tokens_at))

    def continuations(self, found: range, n: int, length: int, most: int) -> Ints:
        """Return the tokens that follow each occurrence of a string, sorted: [occurrences, length].

        After the end of a text, the result contains the marker `end`.

        Args:
            found: Range that `find` returned for the string.
            n: Length of the string.
            most: Maximum number of occurrences. If there are more, evenly spaced ones are used.
        """
        taken = self.order[found.start : found.stop : max(1, -(-len(found) // most))]
        places = taken[:, None] + np.arange(n, n + length)
        rows: Ints = self.tokens[np.minimum(places, len(self.tokens) - 1)]
        rows[np.logical_or.accumulate(rows == self.end, axis=1)] = self.end
        return rows
