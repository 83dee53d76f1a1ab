"""Online eviction policies for a full memory.

Antonios Antoniadis, Joan Boyar, Marek Elias, Lene M. Favrholdt, Ruben Hoeksma, Kim S. Larsen, Adam
Polak, Bertrand Simon: Paging with Succinct Predictions, ICML 2023, arXiv:2210.02775. Besides FIFO
and LRU, there is marking with one predicted bit per request. The paper's bounds hold for pages of
equal size.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal, get_args


class EvictionPolicy(ABC):
    """Eviction policy.

    Attributes:
        held: Predicted bit at the last request of each page in memory: whether it will be requested
            again. The least recently requested page comes first.
    """

    def __init__(self) -> None:
        self.predictions: dict[int, bool] = {}

    def request(self, page: int, again: bool | None = None) -> None:
        """Record the request of a page. The page enters the memory if it is not there.

        Args:
            again: Predicted bit: whether the page will be requested again before the best offline
                policy evicts it (`DiscardBit`), or in the next phase (`PhaseBit`). None predicts
                True for pages in memory and False for new ones.
        """
        again = page in self.predictions if again is None else again
        self.predictions.pop(page, None)
        self.predictions[page] = again

    def evict(self) -> int:
        """Evict a page and return it. The memory must not be empty."""
        page = self.choose_victim()
        del self.predictions[page]
        return page

    @abstractmethod
    def choose_victim(self) -> int:
        """Return the page to evict next."""


class Fifo(EvictionPolicy):
    """Evicts the page that entered first."""

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`. A page in memory keeps its place."""
        self.predictions.setdefault(page, False)

    def choose_victim(self) -> int:
        """See `EvictionPolicy`."""
        return next(iter(self.predictions))


class Lru(EvictionPolicy):
    """Evicts the least recently requested page."""

    def choose_victim(self) -> int:
        """See `EvictionPolicy`."""
        return next(iter(self.predictions))


class Marking(EvictionPolicy):
    """Evicts a page without a mark. When all pages are marked, all marks are cleared and a new
    phase starts.

    Ties are broken by an own random generator with a fixed seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()
        self._chance = random.Random(0)

    def find_unmarked(self) -> list[int]:
        """Return the pages without a mark, after clearing the marks if all have one."""
        if self.predictions.keys() <= self.marked:
            self.marked.clear()
        return [page for page in self.predictions if page not in self.marked]

    def draw_page(self, pages: Collection[int]) -> int:
        """Return one of the pages, at random."""
        return self._chance.choice(sorted(pages))


class DiscardBit(Marking):
    """MARK0: evicts a page that is predicted to be useless, else one without a mark.

    Only pages that are predicted to be useful are marked. With the bits of the best offline policy,
    it has no more misses than that policy.
    """

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`."""
        super().request(page, again)
        (self.marked.add if self.predictions[page] else self.marked.discard)(page)

    def choose_victim(self) -> int:
        """See `EvictionPolicy`."""
        useless = (page for page, again in self.predictions.items() if not again)
        page = next(useless, None)
        return self.draw_page(self.find_unmarked()) if page is None else page


class PhaseBit(Marking):
    """MARK&PREDICT: evicts an unmarked page, if possible one that is predicted not to be requested
    in this phase.

    With correct bits it misses each new page once per phase, at most twice as often as the best
    offline policy. With any bits it misses no more often than marking in the worst case.
    """

    def request(self, page: int, again: bool | None = None) -> None:
        """See `EvictionPolicy`."""
        super().request(page, again)
        self.marked.add(page)

    def choose_victim(self) -> int:
        """See `EvictionPolicy`."""
        pages = self.find_unmarked()
        return self.draw_page([page for page in pages if not self.predictions[page]] or pages)


EvictionName = Literal["fifo", "lru", "discard-bit", "phase-bit"]
"""Names of the policies in parameters."""

POLICIES: dict[str, type[EvictionPolicy]] = dict(
    zip(get_args(EvictionName), (Fifo, Lru, DiscardBit, PhaseBit), strict=True)
)
