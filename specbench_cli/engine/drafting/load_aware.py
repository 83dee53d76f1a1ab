"""Draft lengths that depend on load: on the number of sequences in a step and on forward costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from specbench_cli.engine.drafting.lengths import Length
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ModelOutput, Outcome
from specbench_cli.engine.verify.choosing import Pick

StepCost = Callable[[int, int, bool], float]
"""Time of a step of so many sequences, whose target forward has so many rows in all, as many of
each or not; any unit."""

DraftCost = Callable[[int], float]
"""Time of a draft token more of each of so many sequences; the same unit."""

PROBE_AFTER = 16
"""Steps without a draft after which one token is drafted, since nothing is learnt from none."""

PRIOR_WEIGHT = 8.0
"""Tested tokens that what was known beforehand counts as."""


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a chain of k brings, the target's own included, where each stands with
    probability alpha: 1 + alpha + ... + alpha^k (Leviathan et al., arXiv:2211.17192)."""
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


class LoadAwareLength(Length):
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
        self, session: Session, most: int, acceptance: float, target: StepCost, draft: DraftCost
    ) -> None:
        self._session, self._bound, self._prior_acceptance = session, most, acceptance
        self._target, self._draft = target, draft
        self._accepted = self._tested = 0
        self._steps_without_draft = 0  # steps without a draft, one after another
        session.harness.policy = self

    def begin(self) -> None:
        """See `Length`: the first sequence of a step decides for all."""
        super().begin()
        batch: list[Self] = [
            session.harness.policy for session in self._session.harness.batch_sessions
        ]
        if batch[0] is self:
            for policy, length in zip(batch, self.choose_lengths(batch), strict=True):
                policy.most = length
        self._steps_without_draft = 0 if self.most else self._steps_without_draft + 1
        if self.learns and self._steps_without_draft > PROBE_AFTER:
            self.most, self._steps_without_draft = min(1, self._session.max_draft_length()), 0

    @abstractmethod
    def choose_lengths(self, batch: Sequence[Self]) -> list[int]:
        """The length of each sequence of a step, no longer than there is room for."""

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self.most

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of use."""
        return min(self._bound, self._session.max_draft_length())

    def observe(self, outcome: Outcome) -> None:
        """Count: accepted over tested is the maximum-likelihood estimate, since a chain's length
        cuts it off (accepted over drafted is too low)."""
        self._accepted += len(outcome.path)
        self._tested += outcome.tested

    def acceptance_rate(self, prior: float) -> float:
        """The chance that a token stands, shrunk to what is expected."""
        return (self._accepted + PRIOR_WEIGHT * prior) / (self._tested + PRIOR_WEIGHT)
