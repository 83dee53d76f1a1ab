"""Timing of whole steps with several sequences, which single forwards cannot predict.

Each sequence of a batch drafts a chain of a given length, and the target verifies all of them in
one forward. Lengths change from step to step. A step ends when the next one begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from specbench_cli.engine import host
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.drafting.chains import draft_chains
from specbench_cli.engine.drafting.lengths import FixedLength
from specbench_cli.engine.loop import draft_and_verify_batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

MIN_PROMPT = 16
"""Length of the shortest prompt in the timed steps. Its prefill is not timed."""

UNEVEN_LENGTHS = (1, 3)
"""Draft lengths of the sequences in turn, for steps with different lengths."""


class StepSample(NamedTuple):
    """Times of a step.

    length: Draft tokens per sequence, the mean if they differ.
    drafting: Time of drafting in ns.
    rest: Time of everything else until the next step, in ns.
    even: True if all lengths are equal.
    """

    sequences: int
    length: float
    drafting: int
    rest: int
    even: bool = True


class TimedChains:
    """Drafter of chains with given lengths that records the times of its steps.

    Args:
        drafts: True drafts with the draft model. False takes the first tokens of the prompt.
        lengths: Draft lengths of the timed steps, one per sequence.
        marks: Shared by the sequences of a batch: start of each step and end of its drafting.
    """

    def __init__(
        self, drafts: bool, lengths: Sequence[Sequence[int]], marks: list[tuple[int, int]]
    ) -> None:
        self._drafts, self._lengths, self._marks = drafts, lengths, marks

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        if self._drafts:
            self._model = session.draft()
            self._state = session.new_state(self._model)
            self._model.forward(session.pending_tokens(0), self._state, logits_at=None)

    def schedule(
        self, members: Sequence[tuple[TimedChains, Session]], size: int
    ) -> Sequence[tuple[TimedChains, Session]]:
        """Return all sequences."""
        return members

    def propose(self, session: Session, limit: int) -> Draft:
        """Draft for a single sequence."""
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members: Sequence[tuple[TimedChains, Session]]) -> list[Draft]:
        """Draft chains of the next lengths; no draft tokens after the last ones."""
        clock, at = members[0][1].harness.meter.clock, len(self._marks)
        lengths = self._lengths[at] if at < len(self._lengths) else (0,) * len(members)
        began = clock.now_ns()
        if self._drafts and any(lengths):
            sequences = [(session, method._state) for method, session in members]
            drafts = draft_chains(self._model, sequences, [*map(FixedLength, lengths)])
            host.numbers(drafts[-1].tokens)  # wait until they are computed
        else:
            texts = (session.tokens() for _, session in members)
            drafts = [
                session.chain(text[:length])
                for (_, session), text, length in zip(members, texts, lengths, strict=True)
            ]
        self._marks.append((began, clock.now_ns()))
        return drafts

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Remove rejected tokens from the draft model's state."""
        if self._drafts:
            kept = min(self._state.position(), len(session.tokens()) - 1)
            self._state.rollback(0, kept)


def time_steps(
    workspace: Workspace,
    n: int,
    lengths: Sequence[int],
    prompt: tuple[int, ...],
    sampling: Sampling,
    rng: random.Random,
) -> list[StepSample]:
    """Time a step of n sequences for each draft length, and one with different lengths, after a
    warm-up.

    Args:
        prompt: At least `MIN_PROMPT` ids. The sequences' prompts are parts of it.
        rng: Random generator of the order.
    """
    shared = [(length,) * n for length in lengths]
    unlike = [tuple(UNEVEN_LENGTHS[at % len(UNEVEN_LENGTHS)] for at in range(n))] if n > 1 else []
    order = [(0,) * n, *rng.sample([*shared, *unlike], len(shared) + len(unlike))]
    draft = workspace.decoders.get("draft")
    drafts = draft is not None and draft.vocab_size == workspace.decoders["target"].vocab_size
    stop = StopRule(frozenset(), 2 + sum(max(each) + 1 for each in order))
    # Use texts of different lengths, because attention batches equal lengths.
    requests = [
        Request(f"probe {at}", 1, prompt[at % MIN_PROMPT :][: MIN_PROMPT + at], stop)
        for at in range(n)
    ]
    batch = Batch(workspace, requests, sampling, size=n)
    marks: list[tuple[int, int]] = []
    steppers = [TimedChains(drafts, order, marks) for _ in requests]
    for _ in draft_and_verify_batch(steppers, batch):
        if len(marks) > len(order):
            break
    timed = list(zip(order, marks, marks[1:], strict=False))[1:]
    return [
        StepSample(
            n,
            sum(own) / n,
            drafted - began if drafts else 0,
            end - drafted,
            even=len({*own}) == 1,
        )
        for own, (began, drafted), (end, _) in timed
    ]
