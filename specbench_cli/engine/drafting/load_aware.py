"""Base class of draft length rules that depend on the load: the batch size and forward costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from specbench_cli.engine.drafting.lengths import Length
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ModelOutput, Outcome
from specbench_cli.engine.verify.choosing import Pick

StepCost = Callable[[int, int, bool], float]
"""Function that returns the time of a step, in any unit.

Its arguments are the number of sequences, the total rows of the target's forward, and whether all
sequences have the same number of rows."""

DraftCost = Callable[[int], float]
"""Function that returns the time to draft one more token for each of some sequences, in the unit of
`StepCost`. Its argument is the number of sequences."""

PROBE_AFTER = 16
"""After this many steps without a draft, one token is drafted to measure the acceptance rate
again."""

PRIOR_WEIGHT = 8.0
"""Weight of the prior acceptance rate, as a number of verified tokens."""


def expected_tokens(alpha: float, k: int) -> float:
    """Return the expected number of tokens that a step with k draft tokens commits.

    The number includes the token that the target adds itself. If each draft token is accepted with
    probability alpha, the result is 1 + alpha + ... + alpha^k (Leviathan et al., arXiv:2211.17192).
    """
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


class LoadAwareLength(Length):
    """Base class of rules that set the draft lengths of all sequences in a step together.

    Args:
        most: Maximum draft length.
        acceptance: Assumed acceptance rate of draft tokens before the rule has seen outcomes.
        target, draft: Functions that return the time of verification and of drafting.

    Attributes:
        learns: Whether the rule uses the outcomes of earlier drafts.
    """

    learns = False

    def __init__(
        self, session: Session, most: int, acceptance: float, target: StepCost, draft: DraftCost
    ) -> None:
        self._session, self._bound, self._prior_acceptance = session, most, acceptance
        self._target, self._draft = target, draft
        self._accepted = self._tested = 0
        self._steps_without_draft = 0  # consecutive ones
        session.harness.policy = self

    def begin(self) -> None:
        """Start a new chain. The rule object of the first sequence sets the lengths of all
        sequences.
        """
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
        """Return a draft length for each sequence of a step, within their remaining
        token budgets."""

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if the chain is shorter than the length that was chosen for this step."""
        return self.drafted < self.most

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens: `most`, or the remaining token budget if it
        is smaller."""
        return min(self._bound, self._session.max_draft_length())

    def observe(self, outcome: Outcome) -> None:
        """Count the accepted and the verified draft tokens.

        Accepted tokens divided by verified tokens is the maximum-likelihood estimate of the
        acceptance rate. Dividing by all drafted tokens would give a rate that is too low, because
        tokens after the first rejection are not verified.
        """
        self._accepted += len(outcome.path)
        self._tested += outcome.tested

    def acceptance_rate(self, prior: float) -> float:
        """Return the estimated acceptance rate, shrunk towards the given prior rate."""
        return (self._accepted + PRIOR_WEIGHT * prior) / (self._tested + PRIOR_WEIGHT)
