"""Faulty methods that learn between prompts. The audit must catch all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from methods.sps import Sps


class Learning(Sps):
    """Speculative sampling with its own copy of the draft, trained on the text of each request."""

    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session):
        super().start(session)
        self.model = session.trainable()
        self.state = session.new_state(self.model)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def learn(self, session):
        """Make one training step."""
        ids = torch.tensor([session.tokens()])
        rows = self.model.module(ids).logits[0, :-1]
        torch.nn.functional.cross_entropy(rows, ids[0, 1:]).backward()
        torch.optim.SGD(self.model.module.parameters(), 0.5).step()


class LearnsInTheMiddle(Learning):
    """Method whose weights change while it drafts: its tokens come from the new weights, q from the
    old."""

    def propose(self, session, limit):
        rows = self.state.length()
        older = super().propose(session, limit)
        for weight in self.model.module.parameters():
            weight.data = weight.data.roll(1, -1)
        self.model.publish()
        self.state.rollback(0, rows)
        newer = super().propose(session, limit)
        if older.q is None or (older.q.gather(-1, newer.tokens[:, None]) == 0).any():
            return newer  # a missing state row would be an engine error
        return replace(newer, q=older.q)


class LearnsWhileDecoding(Learning):
    """Method that trains after each verification, so that no single version made the output."""

    def observe(self, session, outcome):
        super().observe(session, outcome)
        with torch.inference_mode(False), torch.enable_grad():
            self.learn(session)


class TeachesAll(Learning):
    """Method that writes the weights it learned into the draft model that all methods share."""

    def learn(self, session):
        super().learn(session)
        shared: Any = session.draft()
        with torch.inference_mode():
            shared.table.copy_(self.model.module.table)


class TeachesTheTarget(Learning):
    """Method that trains the target towards its draft."""

    def learn(self, session):
        super().learn(session)
        with torch.inference_mode():
            table = session.target.table.clamp_(min=-30.0)  # the mean of -inf and -inf is nan
            table.lerp_(self.model.module.table.clamp(min=-30.0), 0.9)
