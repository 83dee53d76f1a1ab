"""Which page leaves a memory that is full: policies that know the past alone.

Antonios Antoniadis, Joan Boyar, Marek Elias, Lene M. Favrholdt, Ruben Hoeksma, Kim S. Larsen, Adam
Polak, Bertrand Simon: Paging with Succinct Predictions, ICML 2023, arXiv:2210.02775: beside LRU,
marking with one predicted bit a request. Their bounds are for pages of one size.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal, get_args


class EvictionPolicy(ABC):
    """A policy.

    Attributes:
        held: the pages in memory, by number: what was predicted when each was last asked for,
            whether it will be again. The one that was asked for least lately is first.
    """

    def __init__(self) -> None:
        self.held: dict[int, bool] = {}

    def request(self, page: int, again: bool | None = None) -> None:
        """Note that a page is asked for; it comes in if it is not held.

        Args:
            again: the predicted bit: whether it will be asked for again before the best offline
                policy takes it out (`DiscardBit`), or in the next phase (`PhaseBit`). None: what
                was asked for while it was held will be again, what is new will not.
        """
        again = page in self.held if again is None else again
        self.held.pop(page, None)
        self.held[page] = again

    def evict(self) -> int:
        """Take a page out; returns which. There must be one."""
        page = self.victim()
        del self.held[page]
        return page

    @abstractmethod
    def victim(self) -> int:
        """The page to take out next."""


class Fifo(EvictionPolicy):
    """The page that came in first."""

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`; a page that is held stays in its place."""
        self.held.setdefault(page, False)

    def victim(self) -> int:
        """See `EvictionPolicy`."""
        return next(iter(self.held))


class Lru(EvictionPolicy):
    """The page that was asked for least lately."""

    def victim(self) -> int:
        """See `EvictionPolicy`."""
        return next(iter(self.held))


class Marking(EvictionPolicy):
    """A page without a mark; marks are forgotten where all pages have one: then a phase begins.

    Draws among equals are those of a generator of its own, always the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()
        self._chance = random.Random(0)

    def unmarked(self) -> list[int]:
        """The pages that may go, where some are held."""
        if self.held.keys() <= self.marked:
            self.marked.clear()
        return [page for page in self.held if page not in self.marked]

    def drawn(self, pages: Collection[int]) -> int:
        """One of them."""
        return self._chance.choice(sorted(pages))


class DiscardBit(Marking):
    """MARK0: a page that is predicted to be of no more use; else one without a mark. Only pages
    that are predicted to be of use are marked.

    With bits that are the best offline policy's it makes no more misses than that.
    """

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`."""
        super().request(page, again)
        (self.marked.add if self.held[page] else self.marked.discard)(page)

    def victim(self) -> int:
        """See `EvictionPolicy`."""
        useless = (page for page, again in self.held.items() if not again)
        page = next(useless, None)
        return self.drawn(self.unmarked()) if page is None else page


class PhaseBit(Marking):
    """MARK&PREDICT: among pages without a mark, one that is predicted not to come in this phase.

    With true bits it misses each page that was not there before once a phase: at most twice as
    often as the best offline policy; with any bits at most as often as marking must.
    """

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`."""
        super().request(page, again)
        self.marked.add(page)

    def victim(self) -> int:
        """See `EvictionPolicy`."""
        pages = self.unmarked()
        return self.drawn([page for page in pages if not self.held[page]] or pages)


EvictionName = Literal["fifo", "lru", "discard-bit", "phase-bit"]
"""The policies by the names that parameters have for them."""

POLICIES: dict[str, type[EvictionPolicy]] = dict(
    zip(get_args(EvictionName), (Fifo, Lru, DiscardBit, PhaseBit), strict=True)
)
