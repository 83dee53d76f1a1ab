"""Eviction policies of SuffixDecoding.

They choose which earlier output to remove when memory is full.

The policies are FIFO, LRU and two marking algorithms. The marking algorithms use one predicted bit
per request (Antonios Antoniadis, Joan Boyar, Marek Elias, Lene M. Favrholdt, Ruben Hoeksma, Kim S.
Larsen, Adam Polak, Bertrand Simon: Paging with Succinct Predictions, ICML 2023, arXiv:2210.02775).
As in that paper, a page is the unit of eviction. In SuffixDecoding, a page is one output. The
bounds in the paper assume that all pages have the same size.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal, get_args


class EvictionPolicy(ABC):
    """Policy that chooses which page to evict from a full memory.

    Attributes:
        predictions: Map from each page in memory to its prediction, the least recently requested
            page first. The prediction is True if the last request predicted that the page will be
            reused.
    """

    def __init__(self) -> None:
        self.predictions: dict[int, bool] = {}

    def request(self, page: int, reused: bool | None = None) -> None:
        """Record a request of a page. The page enters the memory if it is not there.

        Args:
            page: The requested page.
            reused: The predicted bit. `DiscardBit`: whether the page will be requested again before
                the best offline policy evicts it. `PhaseBit`: whether the page will be requested in
                the next phase. None predicts True for pages in memory, and False for new pages.
        """
        reused = page in self.predictions if reused is None else reused
        self.predictions.pop(page, None)
        self.predictions[page] = reused

    def evict(self) -> int:
        """Evict a page from the memory and return it. The memory must not be empty."""
        page = self.choose_victim()
        del self.predictions[page]
        return page

    @abstractmethod
    def choose_victim(self) -> int:
        """Return the page to evict next."""


class Fifo(EvictionPolicy):
    """First in, first out: evicts the page that entered the memory first."""

    def request(self, page: int, reused: bool | None = None) -> None:
        """Record the request of a page. The position of a page in memory does not change."""
        self.predictions.setdefault(page, False)

    def choose_victim(self) -> int:
        """Return the page that entered first."""
        return next(iter(self.predictions))


class Lru(EvictionPolicy):
    """Least recently used: evicts the page whose last request is the oldest."""

    def choose_victim(self) -> int:
        """Return the page whose last request is the oldest."""
        return next(iter(self.predictions))


class Marking(EvictionPolicy):
    """Base class of the marking algorithms, which evict pages without a mark.

    When all pages are marked, all marks are cleared and a new phase starts. If several pages can be
    evicted, one is drawn at random with a fixed seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()
        self._random = random.Random(0)

    def find_unmarked(self) -> list[int]:
        """Return the pages without a mark. If all pages have a mark, clear all marks first."""
        if self.predictions.keys() <= self.marked:
            self.marked.clear()
        return [page for page in self.predictions if page not in self.marked]

    def draw_page(self, pages: Collection[int]) -> int:
        """Return a random page of `pages`."""
        return self._random.choice(sorted(pages))


class DiscardBit(Marking):
    """MARK0: evicts a page that is predicted not to be reused.

    If there is none, evicts an unmarked page.

    Pages that are predicted to be reused are marked. If all predictions are correct, this policy
    has no more misses than the best offline policy.
    """

    def request(self, page: int, reused: bool | None = None) -> None:
        """Record the request of a page. Mark it if it is predicted to be reused."""
        super().request(page, reused)
        (self.marked.add if self.predictions[page] else self.marked.discard)(page)

    def choose_victim(self) -> int:
        """Return a page that is predicted not to be reused.

        If there is none, return an unmarked page.
        """
        not_reused = (page for page, reused in self.predictions.items() if not reused)
        page = next(not_reused, None)
        return self.draw_page(self.find_unmarked()) if page is None else page


class PhaseBit(Marking):
    """MARK&PREDICT: evicts an unmarked page. Pages that are predicted not to be reused come first.

    A page is marked when it is requested. If all predictions are correct, this policy has at most
    twice as many misses as the best offline policy. With wrong predictions, its worst case is the
    worst case of marking without predictions.
    """

    def request(self, page: int, reused: bool | None = None) -> None:
        """Record the request of a page, and mark the page."""
        super().request(page, reused)
        self.marked.add(page)

    def choose_victim(self) -> int:
        """Return an unmarked page. Prefer a page that is predicted not to be reused."""
        pages = self.find_unmarked()
        return self.draw_page([page for page in pages if not self.predictions[page]] or pages)


EvictionName = Literal["fifo", "lru", "discard-bit", "phase-bit"]
"""Values of `suffix.eviction`, in the order of `POLICIES`."""

POLICIES: dict[str, type[EvictionPolicy]] = dict(
    zip(get_args(EvictionName), (Fifo, Lru, DiscardBit, PhaseBit), strict=True)
)
