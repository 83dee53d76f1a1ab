"""Timing of whole decoding steps with several sequences.

The time of such a step cannot be predicted from the times of single forwards. So this module
decodes a batch. In each step, each sequence drafts a chain of a chosen length, and the target
verifies all chains in one forward. The length changes from step to step. The time of a step
includes all work until the next step begins.
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
"""Length of the shortest prompt in the timed batch."""

UNEVEN_LENGTHS = (1, 3)
"""Draft lengths of the sequences, alternating, in a step with different lengths."""


class StepSample(NamedTuple):
    """Measured times of a step.

    sequences: Number of sequences in the step.
    length: Number of draft tokens per sequence. If the sequences have different draft lengths, it
        is the mean.
    drafting: Time of drafting in ns.
    rest: Time of all other work until the next step begins, in ns.
    even: True if all sequences have the same draft length.
    """

    sequences: int
    length: float
    drafting: int
    rest: int
    even: bool = True


class TimedChains:
    """Drafter that drafts chains of chosen lengths, and records when each step begins.

    Args:
        drafts: True drafts with the draft model. False copies the first tokens of the prompt.
        lengths: Draft lengths of each step, one for each sequence.
        marks: List to which each step adds two times in ns: its start, and the end of its drafting.
            All sequences of a batch share this list.
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
        """Return all sequences. So every sequence takes part in each step."""
        return members

    def propose(self, session: Session, limit: int) -> Draft:
        """Draft a chain for a single sequence."""
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members: Sequence[tuple[TimedChains, Session]]) -> list[Draft]:
        """Draft a chain for each sequence, with the draft lengths of the next step.

        `lengths` defines a number of steps. After the last of these steps, propose no draft
        tokens.
        """
        clock, at = members[0][1].harness.meter.clock, len(self._marks)
        lengths = self._lengths[at] if at < len(self._lengths) else (0,) * len(members)
        began = clock.now_ns()
        if self._drafts and any(lengths):
            sequences = [(session, method._state) for method, session in members]
            drafts = draft_chains(self._model, sequences, [*map(FixedLength, lengths)])
            host.numbers(drafts[-1].tokens)  # wait until the GPU has computed the drafts
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
    """Time a step of n sequences for each draft length. Also time a step with mixed draft lengths.

    Args:
        workspace: Decoders and states.
        n: Number of sequences.
        lengths: Draft lengths.
        prompt: At least `MIN_PROMPT` token ids. The prompt of each sequence is a part of these
            tokens.
        sampling: Sampling settings.
        rng: Random generator for the order of the steps.
    """
    shared = [(length,) * n for length in lengths]
    unlike = [tuple(UNEVEN_LENGTHS[at % len(UNEVEN_LENGTHS)] for at in range(n))] if n > 1 else []
    order = [(0,) * n, *rng.sample([*shared, *unlike], len(shared) + len(unlike))]
    draft = workspace.decoders.get("draft")
    drafts = draft is not None and draft.vocab_size == workspace.decoders["target"].vocab_size
    stop = StopRule(frozenset(), 2 + sum(max(each) + 1 for each in order))
    # Use prompts of different lengths, as in real batches. With equal lengths, attention could
    # process all sequences together, which is faster.
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
