"""Speculative speculative decoding (SSD): drafts in advance for every likely outcome of
verification.

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
    """Draft worker of SSD. It prepares a draft window for each outcome that it considers likely."""

    def start(self) -> None:
        """Prefill the draft model."""
        self.rollouts = Rollouts(self.session, self.params.length, self.params.guesses)

    def prepare(self, outcomes: Sequence[Guess]) -> None:
        """Prepare a draft window for each outcome: the draft worker's part of step 2 of `Ssd`.

        The draft worker guesses the outcomes itself, because the target predicts none.
        """
        self.rollouts.complete()  # compute the KV entries of the current window
        guesses = self.rollouts.guess(self.params.guesses)  # (number accepted, next token)
        self.rollouts.prepare(guesses)


class Ssd(Method):
    """SSD: while the target verifies, the draft model prepares the next window for each outcome.

    Target and draft model run at the same time, in separate workers. An outcome is the number of
    accepted tokens and the token after them. For each number, the draft model predicts the most
    likely next tokens.
    Lossless because only the target verifies. A prepared window is drawn from the draft model's
    distribution after its outcome, independently of other windows and of the verification, and is
    used for that outcome only. Verification treats the window like any other draft.
    Differs from the plan for SGLang: each number of accepted tokens gets the same number of
    guesses.

    One step:
    1. Take the draft window that was prepared for the last outcome. If none was prepared, draft a
       window now.
    2. The target scores the window. Meanwhile the draft model prepares a window for each number of
       accepted tokens (0 to `length`) and each of `guesses` next tokens. Each forward drafts one
       token of every window.
    3. (engine) Verify; commit; send the outcome to the draft worker.
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
            # Step 1: Take or draft a window. `counts` records whether the window was prepared.
            draft, counts = windows.next()
            # Step 2: Start the preparation. This call returns at once, so draft worker and target
            # run at the same time. Skip it if the budget ends with this window.
            if self.params.guesses and session.max_draft_length() > 1:
                windows.prepare()
            rows = session.score(draft)
            # Step 3: The outcome, and therefore the next window, is known only after verification.
            outcome = session.commit(session.verify(draft, rows))
            windows.settle(outcome.committed)
            yield session.step(draft, outcome, **counts)
