"""Base class of methods that draft a chain of tokens with a draft model.

Code that only plans a run imports this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specbench_cli.engine.method import Method

if TYPE_CHECKING:
    from specbench_cli.engine.models.decoder import State
    from specbench_cli.engine.models.meter import Metered
    from specbench_cli.engine.session import Session
    from specbench_cli.engine.types import Draft, Outcome


class DraftModelMethod(Method):
    """A method with a draft model and one KV cache for it.

    It prefills the draft model, drafts `params.length` tokens per step, and rolls the draft model's
    KV cache back to the committed tokens. Subclasses override what they do differently.

    Attributes:
        model: The draft model.
        state: KV cache (or recurrent state) of the draft model for this sequence.
    """

    model: Metered
    state: State

    def draft_model(self, session: Session) -> Metered:
        """Return the model that drafts for the session's prompt."""
        return session.draft()

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        self.model = self.draft_model(session)
        self.state = session.new_state(self.model)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Draft a chain of `params.length` tokens."""
        from specbench_cli.engine.drafting.chains import draft_chains
        from specbench_cli.engine.drafting.lengths import FixedLength

        length = FixedLength(self.params.length)
        return draft_chains(self.model, [(session, self.state)], [length])[0]

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Roll the draft model's KV cache back to the text without its last committed token."""
        self.state.rollback(0, min(self.state.position(), len(session.tokens()) - 1))
        return None
