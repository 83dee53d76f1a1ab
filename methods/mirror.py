"""Mirror speculative decoding.

Nikhil Bhendawade, Kumari Nishu, Arnav Kundu, Chris Bartels, Minsik Cho, Irina Belousova: Mirror
Speculative Decoding: Breaking the Serial Barrier in LLM Inference, 2025, arXiv:2510.13161.
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
    guess_outcomes,
)


class MirrorParams(MethodParams):
    """Parameters of `Mirror`."""

    length: int = Field(5, ge=1, le=64, description="draft tokens a step (gamma in the paper)")
    candidates: int = Field(
        2, ge=0, le=63, description="early-exit candidates for each place of the window (kappa)"
    )
    layer: int | None = Field(
        None, ge=1, description="target layers before the early exit; half of them if not given"
    )


class MirrorDrafter(Preparer):
    """The draft's side: it prepares a window for every outcome that the target names."""

    def start(self) -> None:
        """Prefill the draft."""
        self.rollouts = Rollouts(self.session, self.params.length, self.params.candidates)

    def prepare(self, told: Sequence[Guess]) -> None:
        """Step 3, the draft's half."""
        self.rollouts.prepare(told)


class Mirror(Method):
    """Mirror-SD: the target's early exit names likely outcomes, the draft prepares for each.

    Target and draft work at the same time, in workers of their own. While the target's remaining
    layers run, the draft rolls out a window for every candidate at every place where the current
    window may end, so that the next window is often there when verification ends.
    Exact because only rows of the whole target decide; the early ones choose what is prepared. A
    prepared window was drawn from the draft's distribution behind its outcome, independently of the
    others and of what decided the outcome, and is taken for that outcome alone: to verification it
    is a draft like any other.
    Differs from the paper: the draft is an ordinary model and gives one token a forward, where
    theirs is trained for speculative streaming; workers are processes or CUDA streams of one
    machine, where theirs are GPUs and NPUs.

    One step:
    1. The draft's window behind the last outcome: the prepared one if there is one, else drafted
       now.
    2. The target runs its first layers over the window; the exit's rows, through the model's own
       final norm and output matrix, name the `candidates` best tokens for every place.
    3. The target runs its other layers; meanwhile the draft rolls out a window for each number of
       tokens that may stand and each candidate that may follow, all of them a level a forward.
    4. (engine) Verify by the whole target's rows; commit; tell the draft the outcome.
    """

    name: ClassVar[str] = "mirror"
    family: ClassVar[str] = "a draft model, in parallel with the target"
    proposed_in: ClassVar[tuple[str, ...]] = ("bhendawade2025mirror",)
    Params: ClassVar[type[MirrorParams]] = MirrorParams
    params: MirrorParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    workers: ClassVar[int] = 2

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, a step at a time."""
        width, target = self.params.candidates, session.target
        exit_layer = self.params.layer or max(1, target.n_layers // 2)
        windows = DraftWindows(session, MirrorDrafter, self.params)
        session.prefill()
        windows.settle(session.output())
        while session.finish is None:
            # 1. `counts` says whether it had been prepared.
            draft, counts = windows.next()
            if not width or session.max_draft_length() < 2:  # there is nothing to prepare
                rows = session.score(draft)
            else:
                # 2. Half of the target, then its word so far on what may follow each token.
                windows.complete()
                half = session.begin_score(draft, exit_layer)
                wide = min(width + 1, target.vocab_size)
                best, _ = session.candidates(half.early_logits, wide, ahead=range(draft.nodes + 1))
                # 3. The other half, beside which the drafter prepares for (how many tokens stand,
                # the one behind them).
                windows.prepare(
                    guess_outcomes(best, windows.ids, width, session.max_draft_length())
                )
                rows = half.end().rows
            # 4. Rows of the whole target alone.
            outcome = session.commit(session.verify(draft, rows))
            windows.settle(outcome.committed)
            yield session.step(draft, outcome, **counts)
