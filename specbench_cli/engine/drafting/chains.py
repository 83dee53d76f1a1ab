"""Drafting of chains with a draft model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench_cli.engine.drafting.lengths import Length
from specbench_cli.engine.models.decoder import State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, ModelOutput, Tokens
from specbench_cli.engine.verify.choosing import Pick


def draft_chains(
    model: Metered, sequences: Sequence[tuple[Session, State]], lengths: Sequence[Length]
) -> list[Draft]:
    """Draft a chain for each of several sequences. The draft lengths may differ.

    Args:
        model: The draft model, metered by the first session.
        sequences: Sessions, each with its state of the draft model. Pending tokens are processed
            first.
        lengths: Draft length rule of each sequence. The remaining budget is an upper bound.
    """
    picks: list[list[Pick]] = [[] for _ in sequences]
    x = [session.pending_tokens(state.position()) for session, state in sequences]
    for length in lengths:
        length.begin()
    max_lengths = [
        min(length.most, session.max_draft_length())
        for length, (session, _) in zip(lengths, sequences, strict=True)
    ]
    due = [at for at, max_length in enumerate(max_lengths) if max_length > 0]
    while due:
        parts = [sequences[at][0].batch_input(x[at], sequences[at][1]) for at in due]
        going = []
        for at, out in zip(due, model.forward_batch(parts), strict=True):
            picks[at].append(sequences[at][0].pick(out, len(picks[at])))
            if lengths[at].should_continue(out, picks[at][-1]) and len(picks[at]) < max_lengths[at]:
                x[at] = Tokens(picks[at][-1][0][None])
                going.append(at)
        due = going
    return [session.chain_of_picks(own) for (session, _), own in zip(sequences, picks, strict=True)]


def draw_chain(session: Session, rows: Tensor) -> Draft:
    """Draw a chain from the logits [m, V] of one forward, with one token per row."""
    return session.chain_of_picks(
        [session.pick(ModelOutput(row[None, None], row), k) for k, row in enumerate(rows)]
    )
