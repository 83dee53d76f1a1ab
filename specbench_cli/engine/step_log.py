"""Log of what a session scored, verified and committed in each step.

The module `watch` compares the log with the steps that the method reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from specbench_cli.engine.types import Draft, Outcome


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Tokens and structure of a draft, without the draft's large distributions.

    tokens: Token ids [m] on the device.
    parents: Index of each token's parent, -1 for the root. None for a chain.
    """

    tokens: Tensor
    parents: tuple[int, ...] | None

    @classmethod
    def from_draft(cls, draft: Draft, nodes: int | None = None) -> DraftShape:
        """Return the shape of a draft, or of its first `nodes` nodes."""
        if nodes is None or nodes == draft.nodes:
            return cls(draft.tokens, draft.parents)
        parents = draft.parents
        return cls(draft.tokens[:nodes], None if parents is None else parents[:nodes])


@dataclass(slots=True)
class StepRecord:
    """Drafts and outcome of one step of a session.

    Attributes:
        scored: Drafts that the target scored. Nodes that the method did not propose are left out.
        verified: Drafts that the method passed to `verify`.
        committed: The outcome that was committed. None before the commit.
    """

    scored: list[DraftShape] = field(default_factory=list)
    verified: list[DraftShape] = field(default_factory=list)
    committed: Outcome | None = None


class StepLog:
    """Log of everything that a session scored, verified and committed.

    Attributes:
        steps: One entry per step. The prefill has no entry.
    """

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def record_scored(self, draft: Draft, proposed: int | None = None) -> None:
        """Record that the target scored a draft, or only its first `proposed` nodes."""
        self._open_step().scored.append(DraftShape.from_draft(draft, proposed))

    def record_verified(self, draft: Draft) -> None:
        """Record that the session verified a draft."""
        self._open_step().verified.append(DraftShape.from_draft(draft))

    def record_committed(self, outcome: Outcome) -> None:
        """Record the committed outcome, and end the step."""
        self._open_step().committed = outcome

    def _open_step(self) -> StepRecord:
        """Return the current step, which has no committed outcome yet. Create it if needed."""
        if not self.steps or self.steps[-1].committed is not None:
            self.steps.append(StepRecord())
        return self.steps[-1]
