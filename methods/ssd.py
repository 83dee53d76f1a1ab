"""Speculative speculative decoding (SSD): drafts in advance for every likely outcome.

The implementation follows the plan for SGLang in github.com/sgl-project/sglang/issues/27462.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from specbench_cli.api import (
    DraftWindows,
    Field,
    Guess,
    Method,
    MethodParams,
    Preparer,
    Rollouts,
    Session,
    Step,
)


class SsdParams(MethodParams):
    """Parameters of `Ssd`."""

    length: int = Field(5, ge=1, le=64, description="number of draft tokens per step (K)")
    guesses: int = Field(
        2,
        ge=0,
        le=63,
        description="number of guesses of the token after each number of accepted tokens (F)",
    )


class SsdDrafter(Preparer):
    """Draft worker that prepares a draft window for every outcome that it considers likely."""

    def start(self) -> None:
        """Prefill the draft model."""
        self.rollouts = Rollouts(self.session, self.params.length, self.params.guesses)

    def prepare(self, outcomes: Sequence[Guess]) -> None:
        """Carry out the draft's part of step 2. The target predicts nothing, so the draft guesses
        the outcomes."""
        self.rollouts.complete()  # compute the KV entries of the current window
        guesses = self.rollouts.guess(self.params.guesses)  # (number accepted, next token)
        self.rollouts.prepare(guesses)


class Ssd(Method):
    """SSD: while the target verifies, the draft model prepares the next window for each outcome.

    Target and draft model run at the same time, in separate workers. An outcome is the number of
    accepted tokens and the token after them. For each number, the draft model predicts the most
    likely tokens.
    Exact because only the target verifies. A prepared window is drawn from the draft's distribution
    after its outcome, independently of other windows and of the verification, and is used for that
    outcome only. For verification it is a draft like any other.
    Differs from its source: each number of accepted tokens gets the same number of guesses.

    One step:
    1. Take the draft's window after the last outcome: the prepared one, or draft it now.
    2. The target scores the window. Meanwhile the draft prepares a window for each of the `length`
       + 1 numbers of accepted tokens and each of `guesses` next tokens, one level per forward.
    3. (engine) Verify; commit; send the outcome to the draft.
    """

    name: ClassVar[str] = "ssd"
    family: ClassVar[str] = "a draft model, in parallel with the target"
    project: ClassVar[str] = "github.com/sgl-project/sglang/issues/27462"
    Params: ClassVar[type[SsdParams]] = SsdParams
    params: SsdParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    workers: ClassVar[int] = 2

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request, and yield each decoding step."""
        windows = DraftWindows(session, SsdDrafter, self.params)
        session.prefill()
        windows.settle(session.output())
        while session.finish is None:
            # Step 1: `counts` records whether the window was prepared.
            draft, counts = windows.next()
            # Step 2: The message returns at once, so drafter and target run at the same time. It is
            # skipped if the budget ends with this window.
            if self.params.guesses and session.max_draft_length() > 1:
                windows.prepare()
            rows = session.score(draft)
            # Step 3: Only now the outcome, and therefore the next window, is known.
            outcome = session.commit(session.verify(draft, rows))
            windows.settle(outcome.committed)
            yield session.step(draft, outcome, **counts)
