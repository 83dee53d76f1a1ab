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

    length: int = Field(
        5, ge=1, le=64, description="number of draft tokens per step (gamma in the paper)"
    )
    candidates: int = Field(
        2,
        ge=0,
        le=63,
        description="number of early-exit candidates per position of the window (kappa in the"
        " paper)",
    )
    layer: int | None = Field(
        None,
        ge=1,
        description="number of target layers before the early exit; by default half of the layers",
    )


class MirrorDrafter(Preparer):
    """Draft worker of Mirror.

    It prepares a draft for each likely outcome of the target's verification.
    """

    def start(self) -> None:
        """Prefill the draft model."""
        self.rollouts = Rollouts(self.session, self.params.length, self.params.candidates)

    def prepare(self, outcomes: Sequence[Guess]) -> None:
        """Prepare a draft window for each outcome (step 3 of the docstring of `Mirror`)."""
        self.rollouts.prepare(outcomes)


class Mirror(Method):
    """Mirror-SD: an early exit of the target predicts outcomes; the draft model prepares for each.

    Target and draft model run at the same time, in separate workers. An outcome is the number of
    accepted tokens and the token after them. While the target runs its remaining layers, the draft
    model prepares a draft window for each likely outcome of the current window. The next window is
    therefore often ready when verification ends.
    Lossless because only the output of the whole target verifies; the early exit only chooses the
    outcomes to prepare. A prepared window is drawn from the draft model's distribution after its
    outcome, independently of other windows and of the verification, and is used for that outcome
    only.
    Differs from the paper: the draft model is an ordinary model that generates one token per
    forward. The paper's draft model is trained for speculative streaming. Workers are processes or
    CUDA streams of one machine. In the paper they are GPUs and NPUs.

    One step:
    1. Take the draft window that was prepared for the last outcome. If none was prepared, draft a
       window now.
    2. Run the target's first layers on the window. The final norm and the output matrix at the exit
       give the `candidates` best tokens at each position.
    3. Run the target's other layers. Meanwhile the draft model prepares a window for each number of
       accepted tokens and each candidate token after them. Each forward drafts one token of every
       window.
    4. (engine) Verify with the output of the whole target; commit; send the outcome to the draft
       worker.
    """

    name: ClassVar[str] = "mirror"
    family: ClassVar[str] = "a draft model, in parallel with the target"
    proposed_in: ClassVar[tuple[str, ...]] = ("bhendawade2025mirror",)
    Params: ClassVar[type[MirrorParams]] = MirrorParams
    params: MirrorParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    workers: ClassVar[int] = 2

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request, and yield each decoding step."""
        width, target = self.params.candidates, session.target
        exit_layer = self.params.layer or max(1, target.n_layers // 2)
        windows = DraftWindows(session, MirrorDrafter, self.params)
        session.prefill()
        windows.settle(session.output())
        while session.finish is None:
            # Step 1: Take or draft a window. `counts` records whether the window was prepared.
            draft, counts = windows.next()
            if not width or session.max_draft_length() < 2:  # there is nothing to prepare
                rows = session.score(draft)
            else:
                # Step 2: The first half of the target predicts what may follow each token.
                windows.complete()
                half = session.begin_score(draft, exit_layer)
                wide = min(width + 1, target.vocab_size)
                best, _ = session.candidates(half.early_logits, wide, ahead=range(draft.nodes + 1))
                # Step 3: While the target runs its remaining layers, the draft worker prepares a
                # window (the next draft tokens) for each likely outcome of the verification. An
                # outcome is the number of accepted tokens and the token after them.
                windows.prepare(
                    guess_outcomes(best, windows.ids, width, session.max_draft_length())
                )
                rows = half.end().rows
            # Step 4: Verify with the output of the whole target only.
            outcome = session.commit(session.verify(draft, rows))
            windows.settle(outcome.committed)
            yield session.step(draft, outcome, **counts)
