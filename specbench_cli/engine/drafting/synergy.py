"""Synergy: choice of the best draft length for each batch size, from a table.

Qidong Su, Christina Giannoula, Gennady Pekhimenko: The Synergy of Speculative Decoding and Batching
in Serving Large Language Models, 2023, arXiv:2310.18813.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from specbench_cli.engine.drafting.load_aware import (
    DraftCost,
    LoadAwareLength,
    StepCost,
    expected_tokens,
)
from specbench_cli.engine.session import Session

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes in the table of `SynergyLength`."""


def best_length(
    alpha: float, batch_size: int, max_length: int, target: StepCost, draft: DraftCost
) -> int:
    """Return the draft length s that minimizes the time per token, for `batch_size` = b sequences.

    The time per token is (t_target(b, b (s + 1)) + s t_draft(b)) / tokens(s). Among equally good
    lengths, the function returns the shortest.
    """
    return min(
        range(max_length + 1),
        key=lambda s: (
            (target(batch_size, batch_size * (s + 1), True) + s * draft(batch_size))
            / expected_tokens(alpha, s)
        ),
    )


class SynergyLength(LoadAwareLength):
    """Draft length rule that looks up the best length for the number of sequences in a step.

    For a number between two batch sizes of the table, the rule uses the entry of the larger size.
    """

    def __init__(
        self, session: Session, most: int, acceptance: float, target: StepCost, draft: DraftCost
    ) -> None:
        super().__init__(session, most, acceptance, target, draft)
        self._table: dict[int, int] = {}

    def choose_lengths(self, batch: Sequence[Self]) -> list[int]:
        """Return the same draft length for all sequences, as far as their budgets allow it."""
        batch_size = next((size for size in BATCH_SIZES if size >= len(batch)), BATCH_SIZES[-1])
        if batch_size not in self._table:
            known, bound = self._prior_acceptance, self._bound
            self._table[batch_size] = best_length(
                known, batch_size, bound, self._target, self._draft
            )
        return [min(self._table[batch_size], each.max_draft_tokens) for each in batch]
