"""A suffix array: where any string occurs in texts that stay as they are.

Udi Manber, Gene Myers: Suffix Arrays: A New Method for On-Line String Searches, SIAM Journal on
Computing, 1993. The sorting is libdivsufsort's.
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
    """All places of some texts, in the order of what stands there.

    A string's occurrences are neighbours in that order, so that two binary searches find them; and
    what comes behind them is in order too.

    Args:
        tokens: [n] whole numbers, the texts one after another. Each is followed by `end`, which is
            no token, so that no string goes on from one into the next.
        order: [n] int, the places from 0 to n - 1.

    Attributes:
        end: see `tokens`; the last of them.
    """

    def __init__(self, tokens: Ints, order: Ints) -> None:
        self.tokens, self.order = tokens, order
        self.end = int(tokens[-1])

    @staticmethod
    def sort(texts: Iterable[Sequence[int]], end: int) -> tuple[Ints, Ints]:
        """Tokens (uint16 where they fit, else int32) and order (int32, or int64 of more than 2^31
        tokens), for the class.

        Args:
            end: greater than each token; with no text at all it stands alone.
        """
        # Only who makes one needs the library, which brings a runtime of threads.
        from pydivsufsort import divsufsort

        fitting = np.uint16 if end <= np.iinfo(np.uint16).max else np.int32
        parts = [np.asarray([*text, end], dtype=fitting) for text in texts]
        tokens = np.concatenate(parts or [np.asarray([end], dtype=fitting)])
        return tokens, divsufsort(tokens)

    def find(self, string: Sequence[int]) -> range:
        """The places in `order` where a string begins; none for one that does not occur."""
        wanted, n = list(string), len(string)

        def there(place: int) -> list[int]:
            found: list[int] = self.tokens[place : place + n].tolist()
            return found

        order: Any = self.order
        first = bisect_left(order, wanted, key=there)
        return range(first, bisect_right(order, wanted, first, key=there))

    def continuations(self, found: range, n: int, length: int, most: int) -> Ints:
        """What comes behind the occurrences of a string of n tokens: [at most `most`, length], its
        rows in order, filled with `end` from the end of a text on.

        Args:
            most: of more occurrences as many are taken, at even distances in their order.
        """
        taken = self.order[found.start : found.stop : max(1, -(-len(found) // most))]
        places = taken[:, None] + np.arange(n, n + length)
        rows: Ints = self.tokens[np.minimum(places, len(self.tokens) - 1)]
        rows[np.logical_or.accumulate(rows == self.end, axis=1)] = self.end
        return rows
