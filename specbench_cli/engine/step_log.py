"""Log of what a session scored, verified and committed in each step.

`watch` compares it with the steps that the method reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from specbench_cli.engine.types import Draft, Outcome


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Tokens and structure of a draft, without its distributions, which are large.

    tokens: [m] on the device. parents: As in `Draft`.
    """

    tokens: Tensor
    parents: tuple[int, ...] | None

    @classmethod
    def from_draft(cls, draft: Draft, nodes: int | None = None) -> DraftShape:
        """Return the shape of a draft, or of its first nodes."""
        if nodes is None or nodes == draft.nodes:
            return cls(draft.tokens, draft.parents)
        parents = draft.parents
        return cls(draft.tokens[:nodes], None if parents is None else parents[:nodes])


@dataclass(slots=True)
class StepRecord:
    """Drafts and outcome of one step of a session.

    Attributes:
        scored: Drafts that the target scored, without nodes that the method did not propose.
        verified: Drafts that were passed to `verify`.
        committed: The committed outcome. None before the commit.
    """

    scored: list[DraftShape] = field(default_factory=list)
    verified: list[DraftShape] = field(default_factory=list)
    committed: Outcome | None = None


class StepLog:
    """Log of everything that a session scored, verified and committed.

    Attributes:
        steps: One entry per step, without the prefill.
    """

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def record_scored(self, draft: Draft, proposed: int | None = None) -> None:
        """Record that a draft, or its first `proposed` nodes, was scored."""
        self._open_step().scored.append(DraftShape.from_draft(draft, proposed))

    def record_verified(self, draft: Draft) -> None:
        """Record that a draft was verified."""
        self._open_step().verified.append(DraftShape.from_draft(draft))

    def record_committed(self, outcome: Outcome) -> None:
        """Record what was committed, and close the step."""
        self._open_step().committed = outcome

    def _open_step(self) -> StepRecord:
        """Return the current step, which has no committed outcome yet."""
        if not self.steps or self.steps[-1].committed is not None:
            self.steps.append(StepRecord())
        return self.steps[-1]
