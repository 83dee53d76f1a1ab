"""Chains that a draft model drafts, and the base class of methods that draft them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specbench_cli.engine.drafting.lengths import Fixed, Length
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.decoder import State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Out, Outcome, Tokens
from specbench_cli.engine.verify.choosing import Pick


class DraftModelMethod(Method):
    """A method with a draft model and one KV cache for it.

    Prefills the draft model, drafts `params.length` tokens per step, and rolls the draft's cache
    back to the committed tokens. Subclasses override the parts that differ.

    Attributes:
        model: the draft model.
        state: its KV cache (or recurrent state) for this sequence.
    """

    model: Metered
    state: State

    def draft_model(self, session: Session) -> Metered:
        """Return the model that drafts for this prompt."""
        return session.draft()

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        self.model = self.draft_model(session)
        self.state = session.new_state(self.model)
        self.model.forward(session.since(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Draft a chain of `params.length` tokens."""
        length = Fixed(self.params.length)
        return draft_chains(self.model, [(session, self.state)], [length])[0]

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Roll the draft's cache back to the text without its last committed token."""
        self.state.rollback(0, min(self.state.position(), len(session.tokens()) - 1))
        return None


def draft_chains(
    model: Metered, sequences: Sequence[tuple[Session, State]], lengths: Sequence[Length]
) -> list[Draft]:
    """Draft a chain for each of several sequences, whose numbers of tokens may differ.

    Args:
        model: of the first one's session.
        sequences: each with its state of the model; what that has not seen is fed first.
        lengths: how long each one's gets; never longer than there is room for.
    """
    picks: list[list[Pick]] = [[] for _ in sequences]
    x = [session.since(state.position()) for session, state in sequences]
    for length in lengths:
        length.begin()
    rooms = [
        min(length.most, session.room())
        for length, (session, _) in zip(lengths, sequences, strict=True)
    ]
    due = [at for at, room in enumerate(rooms) if room > 0]
    while due:
        parts = [sequences[at][0].part(x[at], sequences[at][1]) for at in due]
        going = []
        for at, out in zip(due, model.forward_batch(parts), strict=True):
            picks[at].append(sequences[at][0].pick(out, len(picks[at])))
            if lengths[at].more(out, picks[at][-1]) and len(picks[at]) < rooms[at]:
                x[at] = Tokens(picks[at][-1][0][None])
                going.append(at)
        due = going
    return [session.drawn(own) for (session, _), own in zip(sequences, picks, strict=True)]


def drawn_at_once(session: Session, rows: Tensor) -> Draft:
    """Draw a chain from logits [m, V] that one forward gave, a token from each row."""
    return session.drawn([session.pick(Out(row[None, None], row), k) for k, row in enumerate(rows)])
