"""Draft lengths that depend on load: on the number of sequences in a step and on forward costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from specbench_cli.engine.drafting.lengths import Length
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Out, Outcome
from specbench_cli.engine.verify.choosing import Pick

Verifying = Callable[[int, int, bool], float]
"""Time of a step of so many sequences, whose target forward has so many rows in all, as many of
each or not; any unit."""

Drafting = Callable[[int], float]
"""Time of a draft token more of each of so many sequences; the same unit."""

PROBE = 16
"""Steps without a draft after which one token is drafted, since nothing is learnt from none."""

TRUST = 8.0
"""Tested tokens that what was known beforehand counts as."""


def emitted(alpha: float, k: int) -> float:
    """Tokens that a chain of k brings, the target's own included, where each stands with
    probability alpha: 1 + alpha + ... + alpha^k (Leviathan et al., arXiv:2211.17192)."""
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


class ByLoad(Length):
    """A number of tokens that a policy sets for every sequence of a step at once.

    Args:
        target, draft: what verifying and drafting cost.
        most: bound on the length.
        acceptance: share of tested draft tokens that stand, as far as it is known beforehand.

    Attributes:
        learns: whether it goes by what became of earlier drafts.
    """

    learns = False

    def __init__(
        self, session: Session, most: int, acceptance: float, target: Verifying, draft: Drafting
    ) -> None:
        self._session, self._bound, self._known = session, most, acceptance
        self._target, self._draft = target, draft
        self._stood = self._tested = 0
        self._idle = 0  # steps without a draft, one after another
        session.harness.policy = self

    def begin(self) -> None:
        """See `Length`: the first sequence of a step decides for all."""
        super().begin()
        beside: list[Self] = [session.harness.policy for session in self._session.harness.beside]
        if beside[0] is self:
            for policy, length in zip(beside, self.lengths(beside), strict=True):
                policy.most = length
        self._idle = 0 if self.most else self._idle + 1
        if self.learns and self._idle > PROBE:
            self.most, self._idle = min(1, self._session.room()), 0

    @abstractmethod
    def lengths(self, beside: Sequence[Self]) -> list[int]:
        """The length of each sequence of a step, no longer than there is room for."""

    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self.most

    @property
    def room(self) -> int:
        """Most tokens of use."""
        return min(self._bound, self._session.room())

    def observe(self, outcome: Outcome) -> None:
        """Count: accepted over tested is the maximum-likelihood estimate, since a chain's length
        cuts it off (accepted over drafted is too low)."""
        self._stood += len(outcome.path)
        self._tested += outcome.tested

    def alpha(self, expected: float) -> float:
        """The chance that a token stands, shrunk to what is expected."""
        return (self._stood + TRUST * expected) / (self._tested + TRUST)
