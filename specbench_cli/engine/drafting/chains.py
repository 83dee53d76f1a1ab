"""Drafting of chains of tokens with a draft model, for several sequences at once."""

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
        model: The draft model. The first session measures its forwards.
        sequences: Pairs of a session and its draft model state. The model first processes the
            tokens that its state does not have yet.
        lengths: The draft length rule of each sequence. No draft is longer than the remaining token
            budget.
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
    """Draw one draft token from each row of logits [m, V], and return the chain of m tokens.

    All rows come from one forward.
    """
    return session.chain_of_picks(
        [session.pick(ModelOutput(row[None, None], row), k) for k, row in enumerate(rows)]
    )
