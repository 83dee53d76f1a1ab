"""Chains that a draft model drafts for several sequences at once: one forward a token for all."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine.models.decoder import State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Tokens
from specbench_cli.engine.verify.choosing import Pick


def draft_chains(
    model: Metered, sequences: Sequence[tuple[Session, State]], lengths: Sequence[int]
) -> list[Draft]:
    """Draft a chain for each of several sequences, whose numbers of tokens may differ.

    Args:
        model: of the first one's session.
        sequences: each with its state of the model; what that has not seen is fed first.
        lengths: most tokens of each; no more than it has room for are drafted.
    """
    picks: list[list[Pick]] = [[] for _ in sequences]
    x = [session.since(state.position()) for session, state in sequences]
    due = list(range(len(sequences)))
    for ahead in range(max(lengths)):
        due = [at for at in due if ahead < min(lengths[at], sequences[at][0].room())]
        if not due:
            break
        parts = [sequences[at][0].part(x[at], sequences[at][1]) for at in due]
        for at, out in zip(due, model.forward_batch(parts), strict=True):
            picks[at].append(sequences[at][0].pick(out, ahead))
            x[at] = Tokens(picks[at][-1][0][None])
    return [session.drawn(own) for (session, _), own in zip(sequences, picks, strict=True)]
